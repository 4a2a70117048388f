"""Vector operations that Numba lacks, emitted as portable LLVM IR.

Owns: a 16-lane float32 vector type, dtype-aware loads and stores, exp2, lane reductions, an atomic
counter. Knows nothing of models or attention. A pointer's type carries the element type: a pointer
to float32 holds float32, a pointer to uint16 holds bfloat16; arithmetic is always float32.

Explicit vectors instead of fastmath: the result does not depend on how LLVM vectorises a loop, NaN
and infinity keep their meaning, and LLVM splits the 16 lanes on machines with narrower registers.

Invariant: every load and store is unaligned-safe and touches exactly the lanes it names.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]
import numpy as np
from llvmlite import ir
from numba import config as numba_config
from numba import types as numba_types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

config: Any = numba_config
types: Any = numba_types  # numba is partly annotated; what is used of it here is not
get_or_insert_function: Any = cgutils.get_or_insert_function

LANES = 16
F32 = ir.FloatType()
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
V_F32 = ir.VectorType(F32, LANES)
V_I16 = ir.VectorType(I16, LANES)
V_I32 = ir.VectorType(I32, LANES)

Ptr = Any  # a typed pointer inside a kernel
Vec = Any  # 16 float32 lanes inside a kernel


class BFloat(ir.types.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not name."""

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


BF16 = BFloat()
V_BF16 = ir.VectorType(BF16, LANES)


class Vec16(numba_types.Type):
    """Numba type of 16 float32 lanes."""

    def __init__(self) -> None:
        super().__init__(name="Vec16")


@register_model(Vec16)
class Vec16Model(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, V_F32)  # type: ignore[no-untyped-call]


vec16 = Vec16()
ptr_f32 = types.CPointer(types.float32)
ptr_bf16 = types.CPointer(types.uint16)
ptr_i16 = types.CPointer(types.int16)


def emitter(typer: Callable[..., Any]) -> Any:
    """Make an intrinsic; constant arguments reach the typer as literals."""
    return intrinsic(prefer_literal=True)(typer)


@cache
def native_bf16_dot() -> bool:
    """Whether this CPU rounds to and multiplies bfloat16 itself (and LLVM can name it)."""
    chosen = config.CPU_FEATURES  # NUMBA_CPU_FEATURES: code for another CPU than this one
    if chosen is not None:
        available = "+avx512bf16" in chosen.split(",")
    else:
        available = bool(llvm.get_host_cpu_features().get("avx512bf16"))
    return available and llvm.llvm_version_info[0] >= 18


# ---- IR helpers (called by emitters, not by kernels) ---------------------------------------------


def constant(value: float) -> Any:
    """A vector constant holding the float32 nearest to value in all lanes."""
    return ir.Constant(V_F32, [ir.Constant(F32, float(np.float32(value)))] * LANES)


def splat_ir(builder: Any, scalar: Any, vector_type: Any) -> Any:
    """All lanes of vector_type = scalar."""
    one = builder.insert_element(ir.Constant(vector_type, ir.Undefined), scalar, I32(0))
    zeros = ir.Constant(ir.VectorType(I32, vector_type.count), [0] * vector_type.count)
    return builder.shuffle_vector(one, ir.Constant(vector_type, ir.Undefined), zeros)


def shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def vector_at(builder: Any, pointer: Any, offset: Any, vector_type: Any) -> Any:
    """Pointer to a vector that starts `offset` elements after pointer."""
    return builder.bitcast(builder.gep(pointer, [offset]), vector_type.as_pointer())


def call_intrinsic(builder: Any, name: str, result: Any, args: list[Any]) -> Any:
    fn_type = ir.FunctionType(result, [a.type for a in args])
    return builder.call(get_or_insert_function(builder.module, fn_type, name), args)


def fma_ir(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return call_intrinsic(builder, "llvm.fma.v16f32", V_F32, [a, b, c])


def widen_bf16(builder: Any, lanes: Any) -> Any:
    """<16 x i16> holding bfloat16 -> <16 x float>, exact."""
    wide = builder.zext(lanes, V_I32)
    return builder.bitcast(builder.shl(wide, splat_ir(builder, I32(16), V_I32)), V_F32)


def narrow_bf16(builder: Any, value: Any) -> Any:
    """float -> i16 holding bfloat16, scalars or vectors alike, round to nearest even."""
    if isinstance(value.type, ir.VectorType):
        wide, half, short = V_I32, V_I16, V_BF16
    else:
        wide, half, short = I32, I16, BF16
    if native_bf16_dot():
        return builder.bitcast(builder.fptrunc(value, short), half)
    # Elsewhere LLVM calls a function of compiler-rt that no process has loaded.

    def number(n: int) -> Any:
        return I32(n) if wide == I32 else splat_ir(builder, I32(n), V_I32)

    bits = builder.bitcast(value, wide)
    upper = builder.lshr(bits, number(16))
    carry = builder.add(number(0x7FFF), builder.and_(upper, number(1)))
    nearest = builder.lshr(builder.add(bits, carry), number(16))
    is_nan = builder.fcmp_unordered("uno", value, value)
    quiet = builder.or_(upper, number(0x40))  # a NaN of low bits only must not round to infinity
    return builder.trunc(builder.select(is_nan, quiet, nearest), half)


def load_ir(builder: Any, pointer_type: Any, pointer: Any, offset: Any) -> Any:
    if pointer_type == ptr_bf16:
        raw = builder.load(vector_at(builder, pointer, offset, V_I16), align=2)
        return widen_bf16(builder, raw)
    return builder.load(vector_at(builder, pointer, offset, V_F32), align=4)


def store_ir(builder: Any, pointer_type: Any, pointer: Any, offset: Any, value: Any) -> None:
    if pointer_type == ptr_bf16:
        target = vector_at(builder, pointer, offset, V_I16)
        builder.store(narrow_bf16(builder, value), target, align=2)
    else:
        builder.store(value, vector_at(builder, pointer, offset, V_F32), align=4)


def max_ir(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _reduce(builder: Any, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
    width = LANES
    while width > 1:
        width //= 2
        low = shuffle(builder, value, value, list(range(width)))
        high = shuffle(builder, value, value, list(range(width, 2 * width)))
        value = combine(low, high)
    return builder.extract_element(value, I32(0))


# ---- pointers, loads, stores ---------------------------------------------------------------------


def _pointer_from_int(result: Any) -> Callable[..., Any]:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(result))

    return codegen


@emitter
def as_f32(typing: Any, address: Any) -> Any:
    """int64 address -> pointer to float32."""
    return ptr_f32(types.int64), _pointer_from_int(ptr_f32)


@emitter
def as_bf16(typing: Any, address: Any) -> Any:
    """int64 address -> pointer to bfloat16."""
    return ptr_bf16(types.int64), _pointer_from_int(ptr_bf16)


@emitter
def as_i16(typing: Any, address: Any) -> Any:
    """int64 address -> pointer to uint16, as plain bits."""
    return ptr_i16(types.int64), _pointer_from_int(ptr_i16)


@emitter
def as_i32(typing: Any, address: Any) -> Any:
    """int64 address -> pointer to int32."""
    result = types.CPointer(types.int32)
    return result(types.int64), _pointer_from_int(result)


@emitter
def as_i64(typing: Any, address: Any) -> Any:
    """int64 address -> pointer to int64."""
    result = types.CPointer(types.int64)
    return result(types.int64), _pointer_from_int(result)


@emitter
def stack_f32(typing: Any, count: Any) -> Any:
    """Pointer to `count` float32 (a constant) that live as long as the calling kernel's thread runs."""
    if not isinstance(count, types.IntegerLiteral):
        return None
    number = count.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return cgutils.alloca_once(builder, F32, size=number)  # type: ignore[no-untyped-call]

    return ptr_f32(count), codegen


@emitter
def shifted(typing: Any, pointer: Any, offset: Any) -> Any:
    """The pointer `offset` elements further."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.gep(args[0], [args[1]])

    return pointer(pointer, types.int64), codegen


@emitter
def pointer_like(typing: Any, pointer: Any, address: Any) -> Any:
    """int64 address -> pointer of the same type as `pointer`."""
    return pointer(
        pointer, types.int64
    ), lambda context, builder, signature, args: builder.inttoptr(
        args[1], context.get_value_type(pointer)
    )


@emitter
def load16(typing: Any, pointer: Any, offset: Any) -> Any:
    """16 elements at pointer + offset, as float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return load_ir(builder, pointer, args[0], args[1])

    return vec16(pointer, types.int64), codegen


@emitter
def store16(typing: Any, pointer: Any, offset: Any, value: Any) -> Any:
    """Round 16 lanes to the pointer's dtype and store them at pointer + offset."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        store_ir(builder, pointer, args[0], args[1], args[2])
        return context.get_dummy_value()

    return types.void(pointer, types.int64, vec16), codegen


@emitter
def load1(typing: Any, pointer: Any, offset: Any) -> Any:
    """One element at pointer + offset, as float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        raw = builder.load(builder.gep(args[0], [args[1]]))
        if pointer == ptr_bf16:
            raw = builder.bitcast(builder.shl(builder.zext(raw, I32), I32(16)), F32)
        return raw

    return types.float32(pointer, types.int64), codegen


@emitter
def store1(typing: Any, pointer: Any, offset: Any, value: Any) -> Any:
    """Round one float32 to the pointer's dtype and store it at pointer + offset."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        raw = args[2]
        if pointer == ptr_bf16:
            raw = narrow_bf16(builder, raw)
        builder.store(raw, builder.gep(args[0], [args[1]]))
        return context.get_dummy_value()

    return types.void(pointer, types.int64, types.float32), codegen


@emitter
def rounded(typing: Any, pointer: Any, value: Any) -> Any:
    """value (16 lanes or a float32) rounded to the pointer's dtype, as float32 again."""
    result = vec16 if value == vec16 else types.float32

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if pointer != ptr_bf16:
            return args[1]
        if result == vec16:
            return widen_bf16(builder, narrow_bf16(builder, args[1]))
        bits = narrow_bf16(builder, args[1])
        return builder.bitcast(builder.shl(builder.zext(bits, I32), I32(16)), F32)

    return result(pointer, result), codegen


# ---- arithmetic ----------------------------------------------------------------------------------


@emitter
def splat(typing: Any, value: Any) -> Any:
    """All 16 lanes = value."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return splat_ir(builder, args[0], V_F32)

    return vec16(types.float32), codegen


def _binary(operation: Callable[[Any, Any, Any], Any]) -> Any:
    def typer(typing: Any, a: Any, b: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return operation(builder, args[0], args[1])

        return vec16(vec16, vec16), codegen

    return emitter(typer)


add = _binary(lambda builder, a, b: builder.fadd(a, b))
sub = _binary(lambda builder, a, b: builder.fsub(a, b))
mul = _binary(lambda builder, a, b: builder.fmul(a, b))
div = _binary(lambda builder, a, b: builder.fdiv(a, b))
maximum = _binary(max_ir)
minimum = _binary(lambda builder, a, b: builder.select(builder.fcmp_ordered("<", a, b), a, b))


@emitter
def fma(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c with one rounding."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return fma_ir(builder, *args)

    return vec16(vec16, vec16, vec16), codegen


@emitter
def first_lane(typing: Any, value: Any) -> Any:
    """Lane 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.extract_element(args[0], I32(0))

    return types.float32(vec16), codegen


@emitter
def sum_lanes(typing: Any, value: Any) -> Any:
    """Sum of 16 lanes, always in the same order."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _reduce(builder, args[0], builder.fadd)

    return types.float32(vec16), codegen


@emitter
def max_lanes(typing: Any, value: Any) -> Any:
    """Largest of 16 lanes (NaN lanes may be passed over)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _reduce(builder, args[0], lambda a, b: max_ir(builder, a, b))

    return types.float32(vec16), codegen


def _exp2_coefficients(degree: int = 5) -> list[float]:
    """Highest power first; near-minimax for 2**f on [-0.5, 0.5] with relative error below 2e-7."""
    f = 0.5 * np.cos(np.pi * (np.arange(64) + 0.5) / 64)
    chebyshev: Any = np.polynomial.chebyshev.Chebyshev
    fit = chebyshev.fit(f, np.exp2(f), degree, domain=[-0.5, 0.5])
    power = fit.convert(kind=np.polynomial.Polynomial, domain=[-1, 1]).coef
    power[0] = 1.0  # 2**0 must be exactly 1: skipping a fully masked tile then changes no bit
    return [float(c) for c in power[::-1]]


@emitter
def exp2(typing: Any, value: Any) -> Any:
    """2**value per lane for value <= 127: 0 below -126; NaN stays NaN."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        magic = 12582912.0  # 1.5 * 2**23: adding it leaves the rounded integer in the low bits
        x = args[0]
        rounded_x = builder.fadd(x, constant(magic))
        f = builder.fsub(x, builder.fsub(rounded_x, constant(magic)))
        first, *rest = _exp2_coefficients()
        poly = constant(first)
        for coefficient in rest:
            poly = fma_ir(builder, poly, f, constant(coefficient))
        bits = builder.shl(builder.bitcast(rounded_x, V_I32), splat_ir(builder, I32(23), V_I32))
        bits = builder.add(bits, splat_ir(builder, I32(127 << 23), V_I32))
        result = builder.fmul(poly, builder.bitcast(bits, V_F32))
        # Below -126 (-inf included) the exponent has wrapped. A NaN compares false and stays.
        too_small = builder.fcmp_ordered("<", x, constant(-126.0))
        return builder.select(too_small, constant(0.0), result)

    return vec16(vec16), codegen


@emitter
def keep_range(typing: Any, value: Any, low: Any, high: Any) -> Any:
    """Lane i stays if low <= i < high, else becomes -inf."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = ir.Constant(V_I32, list(range(LANES)))
        bounds = [splat_ir(builder, builder.trunc(a, I32), V_I32) for a in args[1:]]
        inside = builder.and_(
            builder.icmp_signed(">=", lanes, bounds[0]), builder.icmp_signed("<", lanes, bounds[1])
        )
        return builder.select(inside, args[0], constant(float("-inf")))

    return vec16(vec16, types.int64, types.int64), codegen


@emitter
def fetch_add(typing: Any, counter: Any) -> Any:
    """Atomically add one to the int64 at the pointer; returns the value before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", args[0], I64(1), "monotonic")

    return types.int64(counter), codegen
