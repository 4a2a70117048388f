"""Register-tiled product of int8 inputs and int8 weights, with scales per group of inputs.

    C[r, j] = sum over groups g:  scale[r, g] * scale[g, j] * sum over k in g:  A[r, k] * B[k, j]

The CPU multiplies unsigned by signed bytes (VNNI), so a weight lies here as w + 128, and what that
adds to a group's sum, 128 * sum(A[r, g]), is taken off by starting from its negative. The sums of a
group are exact in int32; they become float32 and are added up in order, so that a row's bits do not
depend on the rows that share its tile.

Knows nothing of how values were quantized; the caller owns all memory.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]
from llvmlite import ir

from trident_kernels.cpu.simd import (
    F32,
    I64,
    LANES,
    V_F32,
    V_I32,
    call_intrinsic,
    config,
    emitter,
    fma_ir,
    ptr_f32,
    splat_ir,
    types,
    vec16,
    vector_at,
)

GROUP = 64  # inputs that share a scale
WORDS = GROUP // 4  # 32-bit words of four inputs
BLOCK = WORDS + 1  # rows of words that a group of weights takes: the last one holds its scales
MAX_ROWS = 6
_V_I8 = ir.VectorType(ir.IntType(8), 4 * LANES)

ptr_i32 = types.CPointer(types.int32)


@cache
def native_int8_dot() -> bool:
    """Whether this CPU multiplies and adds up bytes itself."""
    chosen = config.CPU_FEATURES  # NUMBA_CPU_FEATURES: code for another CPU than this one
    if chosen is not None:
        return "+avx512vnni" in chosen.split(",")
    return bool(llvm.get_host_cpu_features().get("avx512vnni"))


def _dot(builder: Any, total: Any, weights: Any, inputs: Any) -> Any:
    """total + the sums of four products in each word; weights unsigned, inputs signed."""
    if llvm.llvm_version_info[0] >= 21:
        weights, inputs = builder.bitcast(weights, _V_I8), builder.bitcast(inputs, _V_I8)
    name = "llvm.x86.avx512.vpdpbusd.512"
    return call_intrinsic(builder, name, V_I32, [total, weights, inputs])


def _group_sums(
    builder: Any, inputs: list[Any], weights: Any, stride: Any, starts: list[Any], vectors: int
) -> list[list[Any]]:
    """Emit the loop over one group's words; the exact sums, [vector][row]."""
    entry = builder.block
    body = builder.append_basic_block("words")
    after = builder.append_basic_block("words.end")
    builder.branch(body)
    builder.position_at_end(body)
    k = builder.phi(I64)
    k.add_incoming(I64(0), entry)
    phis = [[builder.phi(V_I32) for _ in starts] for _ in range(vectors)]
    splats = [
        splat_ir(builder, builder.load(builder.gep(row, [k]), align=4), V_I32) for row in inputs
    ]
    row_start = builder.mul(k, stride)
    sums = []
    for v in range(vectors):
        at = vector_at(builder, weights, builder.add(row_start, I64(v * LANES)), V_I32)
        vector = builder.load(at, align=4)
        sums.append([_dot(builder, phi, vector, word) for phi, word in zip(phis[v], splats)])
    following = builder.add(k, I64(1))
    k.add_incoming(following, body)
    for v in range(vectors):
        for r, start in enumerate(starts):
            phis[v][r].add_incoming(start, entry)
            phis[v][r].add_incoming(sums[v][r], body)
    builder.cbranch(builder.icmp_signed("<", following, I64(WORDS)), body, after)
    builder.position_at_end(after)
    return sums


def _emit_tile(builder: Any, shape: tuple[int, int], args: Any) -> None:
    """One register tile of shape (rows, vectors); args as multiply_int8."""
    rows, vectors = shape
    a, a_stride, scales, starts, groups, b, b_stride, c, c_stride = args
    word_rows = [builder.gep(a, [builder.mul(a_stride, I64(r))]) for r in range(rows)]
    group_rows = [builder.mul(groups, I64(r)) for r in range(rows)]
    entry = builder.block
    body = builder.append_basic_block("groups")
    after = builder.append_basic_block("groups.end")
    builder.cbranch(builder.icmp_signed(">", groups, I64(0)), body, after)
    builder.position_at_end(body)
    g = builder.phi(I64)
    g.add_incoming(I64(0), entry)
    totals = [[builder.phi(V_F32) for _ in range(rows)] for _ in range(vectors)]
    places = [builder.add(row, g) for row in group_rows]
    first = builder.mul(g, I64(WORDS))
    weights = builder.gep(b, [builder.mul(builder.mul(g, I64(BLOCK)), b_stride)])
    sums = _group_sums(
        builder,
        [builder.gep(row, [first]) for row in word_rows],
        weights,
        b_stride,
        [splat_ir(builder, builder.load(builder.gep(starts, [at])), V_I32) for at in places],
        vectors,
    )
    factors = [splat_ir(builder, builder.load(builder.gep(scales, [at])), V_F32) for at in places]
    last_row = builder.mul(b_stride, I64(WORDS))
    news = []
    for v in range(vectors):
        at = vector_at(builder, weights, builder.add(last_row, I64(v * LANES)), V_F32)
        weight_scale = builder.load(at, align=4)
        scaled = [builder.fmul(builder.sitofp(total, V_F32), weight_scale) for total in sums[v]]
        news.append([fma_ir(builder, scaled[r], factors[r], totals[v][r]) for r in range(rows)])
    following = builder.add(g, I64(1))
    zero = ir.Constant(V_F32, [ir.Constant(F32, 0.0)] * LANES)
    last = builder.block
    g.add_incoming(following, last)
    for v in range(vectors):
        for r in range(rows):
            totals[v][r].add_incoming(zero, entry)
            totals[v][r].add_incoming(news[v][r], last)
    builder.cbranch(builder.icmp_signed("<", following, groups), body, after)
    builder.position_at_end(after)
    for v in range(vectors):
        for r in range(rows):
            result = builder.phi(V_F32)
            result.add_incoming(zero, entry)
            result.add_incoming(news[v][r], last)
            totals[v][r] = result
    for v in range(vectors):
        for r in range(rows):
            at = builder.add(builder.mul(c_stride, I64(r)), I64(v * LANES))
            builder.store(totals[v][r], vector_at(builder, c, at, V_F32), align=4)


@emitter
def multiply_int8(
    typing: Any,
    vectors: Any,
    rows: Any,
    a: Any,
    a_stride: Any,
    scales: Any,
    starts: Any,
    groups: Any,
    b: Any,
    b_stride: Any,
    c: Any,
    c_stride: Any,
) -> Any:
    """The product above for 1..6 rows (chosen at run time) and 16 * vectors columns (a constant).

    a: pointer to words of four bytes; b: to blocks of 17 rows of words, the last of each being float32
    scales; a_stride, b_stride in words; scales, starts: pointers to [rows, groups] float32 and int32,
    starts being -128 * the sum of a group's inputs; c: pointer to float32.
    """
    if not isinstance(vectors, types.IntegerLiteral):
        return None
    n_vectors = vectors.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        after = builder.append_basic_block("rows.end")
        cases = [builder.append_basic_block(f"rows.{r}") for r in range(1, MAX_ROWS + 1)]
        switch = builder.switch(args[1], after)
        for r, block in enumerate(cases, start=1):
            switch.add_case(I64(r), block)
            builder.position_at_end(block)
            _emit_tile(builder, (r, n_vectors), args[2:])
            builder.branch(after)
        builder.position_at_end(after)
        return context.get_dummy_value()

    i64 = types.int64
    signature = types.void(
        vectors, i64, ptr_i32, i64, ptr_f32, ptr_i32, i64, ptr_i32, i64, ptr_f32, i64
    )
    return signature, codegen


@emitter
def store_bytes(typing: Any, pointer: Any, offset: Any, value: Any) -> Any:
    """Store the low byte of each of 16 lanes' bits; offset in bytes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        small = ir.VectorType(ir.IntType(8), LANES)
        low = builder.trunc(builder.bitcast(args[2], V_I32), small)
        start = builder.bitcast(args[0], ir.IntType(8).as_pointer())
        builder.store(low, vector_at(builder, start, args[1], small), align=1)
        return context.get_dummy_value()

    return types.void(ptr_i32, types.int64, vec16), codegen
