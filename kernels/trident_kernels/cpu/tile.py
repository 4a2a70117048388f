"""Register-tiled matrix product and the packing it needs, emitted as LLVM IR.

C[rows, columns] = alpha[rows] * C + A[rows, depth] @ B[depth, columns], C in float32. Everything is
counted in 32-bit words, so that one emitter serves two element types:

    float32   word = one element;          A [rows, depth], B [depth, columns]
    bfloat16  word = two depth neighbours; A [rows, depth/2], B [depth/2, columns] (two-element words)

Per step a tile of R rows and V vectors does R*V multiply-adds on V loads of B and R broadcasts of
A: 6 x 4 fills the 32 registers of AVX-512 and is bound by arithmetic, not by loads. Each row's
chain of additions over depth is the same for every R, so a row's bits do not depend on the rows
that share its tile.

Knows nothing of attention or caches; the caller owns all memory.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

from trident_kernels.cpu.simd import (
    BF16,
    F32,
    I32,
    I64,
    LANES,
    V_F32,
    V_I16,
    V_I32,
    call_intrinsic,
    emitter,
    fma_ir,
    load_ir,
    ptr_bf16,
    ptr_f32,
    shuffle,
    splat_ir,
    types,
    vector_at,
)

MAX_ROWS = 6
V_DOT = ir.VectorType(BF16, 2 * LANES)


def _step(builder: Any, packed: Any, accumulators: list[Any], a_words: list[Any], b: Any) -> None:
    """accumulators[r] += a_words[r] * b for one vector b of 16 words."""
    for r, word in enumerate(a_words):
        a = splat_ir(builder, word, V_I32)
        if packed == ptr_bf16:
            args = [accumulators[r], builder.bitcast(a, V_DOT), builder.bitcast(b, V_DOT)]
            name = "llvm.x86.avx512bf16.dpbf16ps.512"
            accumulators[r] = call_intrinsic(builder, name, V_F32, args)
        else:
            operands = builder.bitcast(a, V_F32), builder.bitcast(b, V_F32)
            accumulators[r] = fma_ir(builder, *operands, accumulators[r])


def _depth_loop(builder: Any, packed: Any, a: Any, b: Any, depth: Any, start: list[Any]) -> Any:
    """Emit the loop over depth words. a = (base, row stride), b = (base, step stride), in words.

    start[v][r] are the initial accumulators; returns the final ones.
    """
    entry, body, after = (
        builder.block,
        builder.append_basic_block("depth"),
        builder.append_basic_block("depth.end"),
    )
    rows, vectors = len(start[0]), len(start)
    # Row pointers are hoisted here: six base registers, one index.
    row_pointers = [builder.gep(a[0], [builder.mul(a[1], I64(r))]) for r in range(rows)]
    builder.cbranch(builder.icmp_signed(">", depth, I64(0)), body, after)

    builder.position_at_end(body)
    k = builder.phi(I64)
    k.add_incoming(I64(0), entry)
    phis = [[builder.phi(V_F32) for _ in range(rows)] for _ in range(vectors)]
    words = [builder.load(builder.gep(p, [k]), align=2) for p in row_pointers]
    b_row = builder.mul(k, b[1])
    finals = []
    for v in range(vectors):
        position = builder.add(b_row, I64(v * LANES))
        b_vector = builder.load(vector_at(builder, b[0], position, V_I32), align=4)
        column = list(phis[v])
        _step(builder, packed, column, words, b_vector)
        finals.append(column)
    following = builder.add(k, I64(1))
    k.add_incoming(following, body)
    for v in range(vectors):
        for r in range(rows):
            phis[v][r].add_incoming(start[v][r], entry)
            phis[v][r].add_incoming(finals[v][r], body)
    builder.cbranch(builder.icmp_signed("<", following, depth), body, after)

    builder.position_at_end(after)
    results = [[builder.phi(V_F32) for _ in range(rows)] for _ in range(vectors)]
    for v in range(vectors):
        for r in range(rows):
            results[v][r].add_incoming(start[v][r], entry)
            results[v][r].add_incoming(finals[v][r], body)
    return results


def _emit_tile(builder: Any, packed: Any, shape: tuple[int, int], args: Any) -> None:
    """One register tile of shape (rows, vectors); args as multiply_rows, alpha None or a pointer."""
    rows, vectors = shape
    a, a_stride, b, b_stride, depth, c, c_stride, alpha = args
    word = I32.as_pointer()
    c_rows = [builder.mul(c_stride, I64(r)) for r in range(rows)]
    offsets = [[builder.add(row, I64(v * LANES)) for row in c_rows] for v in range(vectors)]
    zero = ir.Constant(V_F32, [ir.Constant(F32, 0.0)] * LANES)
    start = [[zero] * rows for _ in range(vectors)]
    for r in range(rows if alpha is not None else 0):
        factor = splat_ir(builder, builder.load(builder.gep(alpha, [I64(r)])), V_F32)
        for v in range(vectors):
            start[v][r] = builder.fmul(factor, load_ir(builder, ptr_f32, c, offsets[v][r]))
    a_operand = (builder.bitcast(a, word), a_stride)
    b_operand = (builder.bitcast(b, word), b_stride)
    result = _depth_loop(builder, packed, a_operand, b_operand, depth, start)
    for r in range(rows):
        for v in range(vectors):
            builder.store(result[v][r], vector_at(builder, c, offsets[v][r], V_F32), align=4)


@emitter
def words_in(typing: Any, packed: Any, elements: Any) -> Any:
    """How many 32-bit words `elements` of the pointer's element type fill (a multiple of 2)."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ashr(args[1], I64(1 if packed == ptr_bf16 else 0))

    return types.int64(packed, types.int64), codegen


@emitter
def shifted_words(typing: Any, packed: Any, words: Any) -> Any:
    """The pointer `words` 32-bit words further."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        moved = builder.gep(builder.bitcast(args[0], I32.as_pointer()), [args[1]])
        return builder.bitcast(moved, context.get_value_type(packed))

    return packed(packed, types.int64), codegen


@emitter
def multiply_rows(
    typing: Any,
    vectors: Any,
    rows: Any,
    a: Any,
    a_stride: Any,
    b: Any,
    b_stride: Any,
    depth: Any,
    c: Any,
    c_stride: Any,
    alpha: Any,
) -> Any:
    """The product above for 1..6 rows (chosen at run time) and 16 * vectors columns (a constant).

    a, b: pointers to the element type; a_stride, b_stride, depth in words. c: pointer to float32.
    alpha: pointer to float32, one factor per row of the old C, or None for C = A @ B.
    """
    if not isinstance(vectors, types.IntegerLiteral):
        return None
    n_vectors = vectors.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        operands = [*args[2:9], None if alpha == types.none else args[9]]
        after = builder.append_basic_block("rows.end")
        cases = [builder.append_basic_block(f"rows.{r}") for r in range(1, MAX_ROWS + 1)]
        switch = builder.switch(args[1], after)
        for r, block in enumerate(cases, start=1):
            switch.add_case(I64(r), block)
            builder.position_at_end(block)
            _emit_tile(builder, a, (r, n_vectors), operands)
            builder.branch(after)
        builder.position_at_end(after)
        return context.get_dummy_value()

    i64 = types.int64
    signature = types.void(vectors, i64, a, i64, b, i64, i64, ptr_f32, i64, alpha)
    return signature, codegen


def _transpose16(builder: Any, rows: list[Any]) -> list[Any]:
    """16 vectors of 16 words -> their transpose, in four rounds of two-input shuffles.

    Round i interleaves the vectors whose indices differ in bit i; after four rounds lane and
    vector index have changed places.
    """
    low = [lane for i in range(LANES // 2) for lane in (i, LANES + i)]
    high = [lane + LANES // 2 for lane in low]
    for _ in range(4):
        half = LANES // 2
        rows = [
            shuffle(builder, rows[i], rows[i + half], lanes)
            for i in range(half)
            for lanes in (low, high)
        ]
    return rows


def _row_words(
    builder: Any, source: Any, packed: Any, pointer: Any, offset: Any, width: int
) -> Any:
    """`width` words of a row as <16 x i32> (upper lanes undefined when width is 8)."""
    if source == ptr_bf16 and packed == ptr_f32:
        return builder.bitcast(load_ir(builder, source, pointer, offset), V_I32)
    narrow = ir.VectorType(I32, width)
    words = builder.load(vector_at(builder, pointer, offset, narrow), align=2)
    if width == LANES:
        return words
    return shuffle(builder, words, words, list(range(width)) + [width] * (LANES - width))


@emitter
def pack_transposed(
    typing: Any,
    width: Any,
    source: Any,
    addresses: Any,
    offset: Any,
    packed: Any,
    packed_stride: Any,
) -> Any:
    """Transpose 16 rows x width words (8 or 16, a constant) into packed[width, 16].

    source: any pointer of the rows' element type (only its type is used); addresses: pointer to 16
    int64 row addresses; offset: first element of each row; packed: pointer to the packed element
    type (bfloat16 stays in two-element words, or is widened when packed is float32); packed_stride
    in words.
    """
    if not isinstance(width, types.IntegerLiteral):
        return None
    n_words = width.literal_value

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        row_type = context.get_value_type(source)
        rows = []
        for i in range(LANES):
            address = builder.load(builder.gep(args[2], [I64(i)]))
            row = builder.inttoptr(address, row_type)
            rows.append(_row_words(builder, source, packed, row, args[3], n_words))
        columns = _transpose16(builder, rows)[:n_words]
        target = builder.bitcast(args[4], I32.as_pointer())
        for w, column in enumerate(columns):
            position = builder.mul(args[5], I64(w))
            builder.store(column, vector_at(builder, target, position, V_I32), align=4)
        return context.get_dummy_value()

    integer = types.int64
    return types.void(width, source, addresses, integer, packed, integer), codegen


@emitter
def pack_pair(typing: Any, first: Any, second: Any, offset: Any, packed: Any, position: Any) -> Any:
    """Interleave 16 bfloat16 of two rows (from element offset) into 16 words at packed[position].

    first, second: pointers to bfloat16 rows; position in words.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        a = builder.load(vector_at(builder, args[0], args[2], V_I16), align=2)
        b = builder.load(vector_at(builder, args[1], args[2], V_I16), align=2)
        lanes = [lane for i in range(LANES) for lane in (i, LANES + i)]
        words = builder.bitcast(shuffle(builder, a, b, lanes), V_I32)
        target = builder.bitcast(args[3], I32.as_pointer())
        builder.store(words, vector_at(builder, target, args[4], V_I32), align=2)
        return context.get_dummy_value()

    return types.void(first, second, types.int64, packed, types.int64), codegen
