"""Triton kernels of serving on a GPU. Import on CUDA only. Torch-free.

The bits of a row depend on that row and on the shapes of the weights: tiles and sections have sizes that no batch
changes, and partial results are added in a fixed order. Shapes and arguments: `serving/device_operations.py`.

PDL: programmatic dependent launch (CUDA programming guide): a kernel starts while the one before it in the stream ends,
and waits for it before it touches what other kernels write or read. Weights are read before.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def add_norm(
    x, delta, weight, out, size, epsilon, ADD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Write the RMSNorm of one row of `x` [rows, size], times `weight`, to `out` [rows, size]. If ADD, first add the
    row of `delta` [rows, size] (the residual branch) to `x` in place.

    Grid: (rows). weight: [size]. epsilon: added to the mean square. BLOCK: power of 2 >= size. PDL: use programmatic
    dependent launch.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    places = tl.arange(0, BLOCK)
    inside = places < size
    at = tl.program_id(0).to(tl.int64) * size + places
    value = tl.load(x + at, inside, 0.0)
    if ADD:
        value = (value.to(tl.float32) + tl.load(delta + at, inside, 0.0).to(tl.float32)).to(x.dtype.element_ty)
        tl.store(x + at, value, inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + epsilon)
    tl.store(out + at, (wide * scale * tl.load(weight + places, inside, 0.0)).to(out.dtype.element_ty), inside)


@triton.jit
def rotate_and_store(
    qkv, keys, values, positions, slots, cosine, sine, query_norm, key_norm, epsilon, heads, kv_heads,
    SIZE: tl.constexpr, HALF: tl.constexpr, ROTATE: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Apply QK norm (if NORM) and RoPE (if ROTATE) to one head of one token in `qkv` [tokens, heads + 2 kv_heads,
    SIZE]. A rotated query is written back in place; a rotated key, or an unchanged value, is written to the token's
    slot in the KV cache.

    Grid: (tokens, heads + 2 kv_heads): query heads, then key heads, then value heads. keys, values: cache [slots,
    kv_heads, SIZE]. positions, slots: int32 [tokens]. cosine, sine: [positions, SIZE / 2]. query_norm, key_norm:
    RMSNorm weights [SIZE], with `epsilon`. HALF: power of 2 >= SIZE / 2. PDL: use programmatic dependent launch.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    places = tl.arange(0, HALF)
    inside = places < SIZE // 2
    source = qkv + (token * (heads + 2 * kv_heads) + head) * SIZE + places
    first, second = tl.load(source, inside, 0.0), tl.load(source + SIZE // 2, inside, 0.0)
    slot = tl.load(slots + token).to(tl.int64)
    if head >= heads + kv_heads:
        target = values + (slot * kv_heads + head - heads - kv_heads) * SIZE + places
        tl.store(target, first, inside)
        tl.store(target + SIZE // 2, second, inside)
    else:
        a, b = first.to(tl.float32), second.to(tl.float32)
        if NORM:
            scale = tl.rsqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / SIZE + epsilon)
            if head < heads:
                p, q = tl.load(query_norm + places, inside), tl.load(query_norm + SIZE // 2 + places, inside)
            else:
                p, q = tl.load(key_norm + places, inside), tl.load(key_norm + SIZE // 2 + places, inside)
            a = (a * scale * p).to(qkv.dtype.element_ty).to(tl.float32)
            b = (b * scale * q).to(qkv.dtype.element_ty).to(tl.float32)
        if ROTATE:
            angle = tl.load(positions + token) * (SIZE // 2) + places
            c, s = tl.load(cosine + angle, inside, 0.0), tl.load(sine + angle, inside, 0.0)
            a, b = a * c - b * s, b * c + a * s
        if head < heads:
            tl.store(source, a.to(qkv.dtype.element_ty), inside)
            tl.store(source + SIZE // 2, b.to(qkv.dtype.element_ty), inside)
        else:
            target = keys + (slot * kv_heads + head - heads) * SIZE + places
            tl.store(target, a.to(keys.dtype.element_ty), inside)
            tl.store(target + SIZE // 2, b.to(keys.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["stride", "tile_tokens"])
def attend(
    qkv, keys, values, positions, tiles, tables, partial, stats, arrivals, out, sinks, scale, softcap, width,
    table_width, stride, tile_tokens, sections, window, CAPPED: tl.constexpr, SINKS: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
    PADDED: tl.constexpr, SECTION: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute attention of one tile of queries (at most `tile_tokens` consecutive tokens of one sequence) for one
    key-value head, and write it to `out` [tokens, query heads, SIZE]. The keys are divided into sections of SECTION
    keys, which several programs compute in parallel (split-K).

    If a tile has several sections, each section's highest score and sum of exp(score - highest) are written to `stats`
    [rows, 2], and its weighted sum of values to `partial` [rows, SIZE]; one row for each (tile, token in the tile,
    query head, section). The program that finishes last merges the sections in a fixed order (log-sum-exp merge).

    Grid: (tiles, KV_HEADS, P); program p of P computes every P-th section. qkv: [tokens, width]. keys, values: KV cache
    [slots, KV_HEADS, SIZE]. positions: int32 [tokens]. tiles: int32 [3, number of tiles], rows `stride` elements apart:
    first token, number of tokens, and row of `tables`. tables: block tables, `table_width` entries a row. arrivals:
    int32 [tiles, KV_HEADS], number of programs that have finished; 0 before and after the launch. scale: factor of the
    scores. softcap: if CAPPED, c that turns scores x into c tanh(x / c). sinks: if SINKS, attention sink (one more
    score) of each query head. sections: maximum number of sections of a sequence. window: keys that a query attends to,
    0: all. GROUP: query heads per key-value head. ROWS: (token, head) pairs of a tile. STEP: keys per iteration. BLOCK:
    tokens of a KV block. GROUP_PADDED, PADDED: powers of 2 >= GROUP, >= SIZE. PDL: use programmatic dependent launch.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile, kv = tl.program_id(0), tl.program_id(1)
    first, count = tl.load(tiles + tile), tl.load(tiles + stride + tile)
    table = tables + tl.load(tiles + 2 * stride + tile).to(tl.int64) * table_width
    rows, dims = tl.arange(0, ROWS), tl.arange(0, PADDED)
    token, head = rows // GROUP_PADDED, kv * GROUP + rows % GROUP_PADDED
    real = (token < count) & (rows % GROUP_PADDED < GROUP)
    begins = tl.load(positions + first)
    position, last = begins + token, begins + count - 1
    oldest = 0
    if window > 0:
        oldest = tl.maximum(0, begins - window + 1)
    held = dims[None, :] < SIZE
    q = tl.load(
        qkv + (first + token)[:, None].to(tl.int64) * width + head[:, None] * SIZE + dims[None, :],
        real[:, None] & held, 0.0,
    )  # fmt: skip
    result = out + ((first + token)[:, None].to(tl.int64) * (KV_HEADS * GROUP) + head[:, None]) * SIZE + dims[None, :]
    first_row = ((tile * tile_tokens + token).to(tl.int64) * (KV_HEADS * GROUP) + head) * sections
    first_section, end_section = oldest // SECTION, last // SECTION + 1
    for section in range(first_section + tl.program_id(2), end_section, tl.num_programs(2)):
        highest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        sum_of = tl.zeros([ROWS, PADDED], tl.float32)
        for start in range(section * SECTION, tl.minimum((section + 1) * SECTION, last + 1), STEP):
            places = start + tl.arange(0, STEP)
            known = (places <= last) & (places >= oldest)
            slot = tl.load(table + places // BLOCK, known, 0).to(tl.int64) * BLOCK + places % BLOCK
            at = (slot[:, None] * KV_HEADS + kv) * SIZE + dims[None, :]
            k = tl.load(keys + at, known[:, None] & held, 0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            if CAPPED:
                scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)  # tanh
            visible = known[None, :] & (places[None, :] <= position[:, None])
            if window > 0:
                visible = visible & (places[None, :] > position[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
            higher = tl.maximum(highest, tl.max(scores, 1))
            finite = tl.where(higher == float("-inf"), 0.0, higher)
            weights, shrink = tl.exp(scores - finite[:, None]), tl.exp(highest - finite)
            total = total * shrink + tl.sum(weights, 1)
            v = tl.load(values + at, known[:, None] & held, 0.0)
            sum_of = tl.dot(weights.to(v.dtype), v, sum_of * shrink[:, None], input_precision="ieee")
            highest = higher
        if end_section - first_section == 1:
            if SINKS:
                sink = tl.load(sinks + head, real, 0.0).to(tl.float32)
                higher = tl.maximum(highest, sink)
                total = total * tl.exp(highest - higher) + tl.exp(sink - higher)
                sum_of *= tl.exp(highest - higher)[:, None]
            tl.store(result, (sum_of / total[:, None]).to(out.dtype.element_ty), real[:, None] & held)
        else:
            row = first_row + section
            tl.store(partial + row[:, None] * SIZE + dims[None, :], sum_of, real[:, None] & held)
            tl.store(stats + 2 * row, highest, real)
            tl.store(stats + 2 * row + 1, total, real)
    programs = tl.minimum(end_section - first_section, tl.num_programs(2))
    if (end_section - first_section > 1) & (tl.program_id(2) < programs):
        tl.debug_barrier()  # all threads have stored
        arrived = tl.atomic_add(arrivals + tile * KV_HEADS + kv, 1, sem="acq_rel")
        if arrived == programs - 1:
            tl.debug_barrier()
            tl.store(arrivals + tile * KV_HEADS + kv, 0)
            highest = tl.full([ROWS], float("-inf"), tl.float32)
            for section in range(first_section, end_section):
                highest = tl.maximum(highest, tl.load(stats + 2 * (first_row + section), real, 0.0))
            total = tl.zeros([ROWS], tl.float32)
            if SINKS:
                sink = tl.load(sinks + head, real, 0.0).to(tl.float32)
                highest = tl.maximum(highest, sink)
                total = tl.exp(sink - highest)
            sum_of = tl.zeros([ROWS, PADDED], tl.float32)
            for section in range(first_section, end_section):
                row = first_row + section
                weight = tl.exp(tl.load(stats + 2 * row, real, 0.0) - highest)
                total += weight * tl.load(stats + 2 * row + 1, real, 1.0)
                part = tl.load(partial + row[:, None] * SIZE + dims[None, :], real[:, None] & held, 0.0)
                sum_of += weight[:, None] * part
            tl.store(result, (sum_of / total[:, None]).to(out.dtype.element_ty), real[:, None] & held)


@triton.jit(do_not_specialize=["rows"])
def product(
    x, weight, bias, out, ends, rows, columns, inner, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
    SPLITS: tl.constexpr, GROUPED: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Compute one tile [ROWS, COLUMNS] of x Wᵀ, in steps of STEP elements of the inner dimension. x: [rows, inner].
    weight: W [columns, inner].

    Split-K, if SPLITS > 1: split s sums over the s-th of SPLITS parts of the inner dimension, and `out` is [SPLITS,
    rows, columns], which `add_splits` sums. If SPLITS is 1, `out` is [rows, columns], and `bias` [columns] is added if
    BIAS. Grid: (row tiles, column tiles, SPLITS). Grouped GEMM of E experts, if GROUPED (SPLITS is 1): `weight` is [E,
    columns, inner], and `ends`, int32 [E], has the exclusive end of each expert's rows in x; no row tile spans two
    experts. Grid: (row tiles, column tiles, E)."""
    z = tl.program_id(2)
    begin, end = 0, rows
    first, last = 0, inner
    matrix = weight
    if GROUPED:
        end = tl.load(ends + z)
        if z > 0:
            begin = tl.load(ends + z - 1)
        matrix = weight + z.to(tl.int64) * columns * inner
    else:
        part = tl.cdiv(inner, STEP * SPLITS) * STEP
        first = z * part
        last = tl.minimum(inner, first + part)
    begin += tl.program_id(0) * ROWS
    if begin < end:
        row, column = (begin + tl.arange(0, ROWS)).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(first, last, STEP):
            place = start + tl.arange(0, STEP)
            a = tl.load(x + row[:, None] * inner + place[None, :], (row[:, None] < end) & (place[None, :] < inner), 0.0)
            at = column[:, None].to(tl.int64) * inner + place[None, :]
            b = tl.load(matrix + at, (column[:, None] < columns) & (place[None, :] < inner), 0.0)
            total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
        if BIAS:
            total += tl.load(bias + column, column < columns, 0.0).to(tl.float32)[None, :]
        if SPLITS > 1:
            row += z.to(tl.int64) * rows
            end += z * rows
        at = row[:, None] * columns + column[None, :]
        tl.store(out + at, total.to(out.dtype.element_ty), (row[:, None] < end) & (column[None, :] < columns))


@triton.jit
def gemv(
    x, delta, norm, weight, bias, out, sum_out, columns, inner, epsilon, COLUMNS: tl.constexpr, PADDED: tl.constexpr,
    NORM: tl.constexpr, ADD: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute COLUMNS elements of the matrix-vector product W v in float32, for one token's row x [inner]. v is x; if
    NORM, v is the RMSNorm of x times `norm` [inner]; if NORM and ADD, v is the RMSNorm of x + delta (residual branch)
    times `norm`, and x + delta is written to `sum_out` [inner].

    Grid: (blocks of columns). weight: W [columns, inner]. If GATED, W is [2 columns, inner], and the result is SwiGLU
    of W v: silu(first half) * second half. bias: [columns], added if BIAS. out: [columns]. epsilon: added to the mean
    square. PADDED: power of 2 >= inner. PDL: use programmatic dependent launch; W is read before the previous kernel
    has ended.
    """
    column, places = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, PADDED)
    inside = places < inner
    at = column[:, None].to(tl.int64) * inner + places[None, :]
    held = (column[:, None] < columns) & inside[None, :]
    matrix = tl.load(weight + at, held, 0.0)
    if GATED:
        other = tl.load(weight + columns.to(tl.int64) * inner + at, held, 0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + places, inside, 0.0)
    if NORM:
        if ADD:
            sum_ = value.to(tl.float32) + tl.load(delta + places, inside, 0.0).to(tl.float32)
            value = sum_.to(x.dtype.element_ty)
            if tl.program_id(0) == 0:
                tl.store(sum_out + places, value, inside)
        wide = value.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 0) / inner + epsilon)
        value = (wide * scale * tl.load(norm + places, inside, 0.0)).to(x.dtype.element_ty)
    wide = value.to(tl.float32)[None, :]
    y = tl.sum(matrix.to(tl.float32) * wide, 1)
    if BIAS:
        y += tl.load(bias + column, column < columns, 0.0).to(tl.float32)
    if GATED:
        y = y.to(x.dtype.element_ty).to(tl.float32)
        y = (y / (1 + tl.exp(-y))).to(x.dtype.element_ty).to(tl.float32)
        y *= tl.sum(other.to(tl.float32) * wide, 1).to(x.dtype.element_ty).to(tl.float32)
    tl.store(out + column, y.to(out.dtype.element_ty), column < columns)


@triton.jit(do_not_specialize=["size"])
def add_splits(
    parts, bias, out, size, columns, SPLITS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Sum the partial results of `product` (split-K) over the splits, in order, and add the bias if BIAS; write BLOCK
    elements to `out` [rows, columns].

    Grid: (blocks of elements). parts: [SPLITS, rows, columns]. bias: [columns]. size: rows x columns.
    """
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    total = tl.load(parts + places, inside, 0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(parts + split * size.to(tl.int64) + places, inside, 0.0)
    if BIAS:
        total += tl.load(bias + places % columns, inside, 0.0).to(tl.float32)
    tl.store(out + places, total.to(out.dtype.element_ty), inside)


@triton.jit
def swiglu(up, out, width, BLOCK: tl.constexpr):
    """Compute SwiGLU for BLOCK elements of a row: out = silu(first half of the row of `up`) * second half of the row.

    Grid: (rows, blocks of a row). up: [rows, 2 width]. out: [rows, width].
    """
    row, places = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < width
    value = tl.load(up + row * 2 * width + places, inside, 0.0).to(tl.float32)
    value = (value / (1 + tl.exp(-value))).to(out.dtype.element_ty).to(tl.float32)
    other = tl.load(up + row * 2 * width + width + places, inside, 0.0).to(tl.float32)
    tl.store(out + row * width + places, (value * other).to(out.dtype.element_ty), inside)


@triton.jit
def reduce_sections(logits, draws, sections, size, stride, BLOCK: tl.constexpr):
    """Reduce one section (BLOCK consecutive logits of one row) to four numbers, as the first step of sampling. The
    numbers are written to `sections`, float64 [rows, sections of a row, 4]: 0: the highest logit (NaN if any is NaN);
    1: its token ID (the lowest among equals); 2: sum of exp(logit - highest); 3: sum of exp((logit - highest) /
    temperature), or 0 if the temperature is 0.

    Grid: (rows, sections of a row). logits: float32, rows of `size` (the vocabulary), `stride` elements apart. draws:
    float64 [3, rows], of which draws[0] is the temperature of each row.
    """
    row, section = tl.program_id(0).to(tl.int64), tl.program_id(1)
    places = section * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    value = tl.load(logits + row * stride + places, inside, float("-inf"))
    highest = tl.max(value, 0)
    best = tl.min(tl.where(value == highest, places, size), 0)
    shifted = value - tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(tl.where(inside, tl.exp(shifted), 0.0).to(tl.float64), 0)
    temperature = tl.load(draws + row).to(tl.float32)
    drawn = total * 0.0
    if temperature > 0:
        drawn = tl.sum(tl.where(inside, tl.exp(shifted / temperature), 0.0).to(tl.float64), 0)
    broken = tl.max((value != value).to(tl.int32), 0) > 0
    target = sections + (row * tl.num_programs(1) + section) * 4
    tl.store(target, tl.where(broken, float("nan"), highest).to(tl.float64))
    tl.store(target + 1, best.to(tl.float64))
    tl.store(target + 2, total)
    tl.store(target + 3, drawn)


@triton.jit
def merge_and_draw(
    logits, draws, sections, out, size, stride, count, BLOCK: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    """Merge the sections of one row, and draw a token if the row's temperature is above 0 (inverse-CDF sampling: the
    first token whose cumulative softmax weight exceeds the fraction `uniform` of the total). Write seven numbers to
    `out`, float64 [rows, 7]: 0: ID of the most likely token; 1: its logit; 2: sum of exp(logit - highest); 3: sum of
    exp((logit - highest) / temperature); 4: ID of the drawn token; 5: its logit; 6: logit of the target token.

    Grid: (rows). logits: float32, rows of `size` (the vocabulary), `stride` elements apart. draws: float64 [3, rows]:
    temperature, uniform in [0, 1), and target token ID of each row. sections: [rows, count, 4], written by
    `reduce_sections` for sections of BLOCK logits. count: sections of a row. PADDED: power of 2 >= count.
    """
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    numbers = tl.arange(0, PADDED)
    held = numbers < count
    source = sections + (row * count + numbers) * 4
    highests = tl.load(source, held, float("-inf"))
    broken = tl.max((highests != highests).to(tl.int32), 0) > 0
    highest = tl.max(highests, 0)
    best = tl.min(tl.where(highests == highest, tl.load(source + 1, held, 0.0), size * 1.0), 0).to(tl.int32)
    best = tl.minimum(best, size - 1)
    shifted = highests - tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(tl.load(source + 2, held, 0.0) * tl.exp(shifted), 0)
    temperature, uniform = tl.load(draws + row), tl.load(draws + rows + row)
    drawn, total_drawn = best, total * 0.0
    if temperature > 0:
        weights = tl.load(source + 3, held, 0.0) * tl.exp(shifted / temperature)
        total_drawn = tl.sum(weights, 0)
        reach = uniform * total_drawn
        last = tl.max(tl.where(weights > 0, numbers, 0), 0)
        chosen = tl.minimum(tl.sum((held & (tl.cumsum(weights, 0) <= reach)).to(tl.int32), 0), last)
        below = tl.sum(tl.where(numbers < chosen, weights, 0.0), 0)
        base = tl.sum(tl.where(numbers == chosen, highests, 0.0), 0)
        scale = tl.sum(tl.where(numbers == chosen, tl.exp(shifted / temperature), 0.0), 0)
        offsets = tl.arange(0, BLOCK)
        places = chosen * BLOCK + offsets
        value = tl.load(logits + row * stride + places, places < size, float("-inf"))
        ratio = (value - base.to(tl.float32)) / temperature.to(tl.float32)
        weight = tl.where(places < size, tl.exp(ratio), 0.0).to(tl.float64) * scale
        last = tl.max(tl.where(weight > 0, offsets, 0), 0)
        within = tl.sum(((places < size) & (below + tl.cumsum(weight, 0) <= reach)).to(tl.int32), 0)
        drawn = chosen * BLOCK + tl.minimum(within, last)
    result = out + row * 7
    tl.store(result, best.to(tl.float64))
    tl.store(result + 1, tl.where(broken, float("nan"), highest))
    tl.store(result + 2, total)
    tl.store(result + 3, total_drawn)
    tl.store(result + 4, drawn.to(tl.float64))
    tl.store(result + 5, tl.load(logits + row * stride + drawn).to(tl.float64))
    target = tl.load(draws + 2 * rows + row).to(tl.int64)
    tl.store(result + 6, tl.load(logits + row * stride + target).to(tl.float64))
