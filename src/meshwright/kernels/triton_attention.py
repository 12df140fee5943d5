"""Triton kernels of attention in serving on a GPU. Import on CUDA only. Torch-free.

The bits of a row depend on that row alone, as in `triton_kernels.py`, which explains PDL. Shapes and arguments:
`device_operations.py`.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def rotate_and_store(
    qkv, keys, values, positions, slots, cosine, sine, query_norm, key_norm, epsilon, heads, kv_heads,
    SIZE: tl.constexpr, HALF: tl.constexpr, ROTATE: tl.constexpr, KEYS: tl.constexpr, NORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Apply QK norm (if NORM) and RoPE (if ROTATE; to keys only if KEYS) to one head of one token in `qkv` [tokens,
    heads + 2 kv_heads, SIZE]. A rotated query is written back in place; a rotated key, or an unchanged value, is
    written to the token's slot in the KV cache.

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
            if not KEYS:
                c, s = tl.where(head < heads, c, 1.0), tl.where(head < heads, s, 0.0)
            a, b = a * c - b * s, b * c + a * s
        if head < heads:
            tl.store(source, a.to(qkv.dtype.element_ty), inside)
            tl.store(source + SIZE // 2, b.to(qkv.dtype.element_ty), inside)
        else:
            target = keys + (slot * kv_heads + head - heads) * SIZE + places
            tl.store(target, a.to(keys.dtype.element_ty), inside)
            tl.store(target + SIZE // 2, b.to(keys.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["stride", "tile_tokens", "sections"])
def attend(
    qkv, keys, values, positions, tiles, tables, partial, stats, arrivals, out, sinks, scale, softcap, width,
    table_width, stride, tile_tokens, sections, window, CHUNKS: tl.constexpr, CAPPED: tl.constexpr,
    SINKS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, ROWS: tl.constexpr,
    SIZE: tl.constexpr, PADDED: tl.constexpr, SHARED: tl.constexpr, SHARED_PADDED: tl.constexpr,
    SECTION: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
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
    score) of each query head. sections: maximum number of sections of a sequence in the launch. window: keys that a
    query attends to, 0: all; if CHUNKS, a query attends to its chunk of `window` positions. GROUP: query heads per
    key-value head. ROWS: (token, head) pairs of a tile. STEP: keys per iteration. BLOCK: tokens of a KV block.
    GROUP_PADDED, PADDED, SHARED_PADDED: powers of 2 >= GROUP, >= SIZE, >= SHARED. PDL: use programmatic dependent
    launch.

    Latent attention, if SHARED is not 0: all heads share one cached vector of SIZE + SHARED elements, `keys` [slots,
    SIZE + SHARED], which is the key (queries have as many elements), and whose first SIZE elements are the value.
    KV_HEADS is the number of groups of GROUP query heads.
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
    least = position * 0
    if window > 0:
        if CHUNKS:
            least = position // window * window
        else:
            least = tl.maximum(0, position - window + 1)
    oldest = tl.min(least, 0)
    held = dims[None, :] < SIZE
    query = qkv + (first + token)[:, None].to(tl.int64) * width + head[:, None] * (SIZE + SHARED)
    q = tl.load(query + dims[None, :], real[:, None] & held, 0.0)
    if SHARED:
        others = tl.arange(0, SHARED_PADDED)[None, :]
        q_others = tl.load(query + SIZE + others, real[:, None] & (others < SHARED), 0.0)
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
            if SHARED:
                at = slot[:, None] * (SIZE + SHARED) + dims[None, :]
            else:
                at = (slot[:, None] * KV_HEADS + kv) * SIZE + dims[None, :]
            k = tl.load(keys + at, known[:, None] & held, 0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            if SHARED:
                rest = keys + slot[:, None] * (SIZE + SHARED) + SIZE + others
                k_others = tl.load(rest, known[:, None] & (others < SHARED), 0.0)
                scores = tl.dot(q_others, tl.trans(k_others), scores, input_precision="ieee")
            scores *= scale
            if CAPPED:
                scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)  # tanh
            visible = known[None, :] & (places[None, :] <= position[:, None]) & (places[None, :] >= least[:, None])
            scores = tl.where(visible, scores, float("-inf"))
            higher = tl.maximum(highest, tl.max(scores, 1))
            finite = tl.where(higher == float("-inf"), 0.0, higher)
            weights, shrink = tl.exp(scores - finite[:, None]), tl.exp(highest - finite)
            total = total * shrink + tl.sum(weights, 1)
            v = k
            if not SHARED:
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


@triton.jit
def rotate_pairs(source, target, cosine, sine, HALF: tl.constexpr, PADDED: tl.constexpr):
    """Apply RoPE to HALF pairs of elements (i, i + HALF) of `source`, and write them to `target`. cosine, sine: [HALF],
    of the token's position. PADDED: power of 2 >= HALF."""
    places = tl.arange(0, PADDED)
    inside = places < HALF
    a = tl.load(source + places, inside, 0.0).to(tl.float32)
    b = tl.load(source + HALF + places, inside, 0.0).to(tl.float32)
    c, s = tl.load(cosine + places, inside, 0.0), tl.load(sine + places, inside, 0.0)
    tl.store(target + places, (a * c - b * s).to(target.dtype.element_ty), inside)
    tl.store(target + HALF + places, (b * c + a * s).to(target.dtype.element_ty), inside)


@triton.jit
def rotate_and_store_latent(
    latent, queries, wide, keys, positions, slots, cosine, sine, norm, epsilon, latent_stride, query_stride, heads,
    SIZE: tl.constexpr, RANK: tl.constexpr, HALF: tl.constexpr, RANK_PADDED: tl.constexpr, HALF_PADDED: tl.constexpr,
):  # fmt: skip
    """For latent attention of one token: program 0 writes the RMSNorm of the latent vector and the rotated key to the
    token's slot in the KV cache; program h writes the rotated features of query head h - 1 to `wide`.

    Grid: (tokens, 1 + heads). latent: rows of RANK elements of the latent vector and 2 HALF of the key, `latent_stride`
    elements apart. queries: rows of [heads, SIZE], `query_stride` elements apart, of which the last 2 HALF features of
    a head are rotated. wide: [tokens, heads, RANK + 2 HALF], whose last 2 HALF elements are written. keys: cache
    [slots, RANK + 2 HALF]. positions, slots: int32 [tokens]. cosine, sine: [positions, HALF]. norm: RMSNorm weight
    [RANK], with `epsilon`. RANK_PADDED, HALF_PADDED: powers of 2 >= RANK, >= HALF.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    angle = tl.load(positions + token) * HALF
    if head == 0:
        places = tl.arange(0, RANK_PADDED)
        inside = places < RANK
        source, target = latent + token * latent_stride, keys + tl.load(slots + token).to(tl.int64) * (RANK + 2 * HALF)
        value = tl.load(source + places, inside, 0.0).to(tl.float32)
        value *= tl.rsqrt(tl.sum(value * value, 0) / RANK + epsilon)
        tl.store(target + places, (value * tl.load(norm + places, inside, 0.0)).to(keys.dtype.element_ty), inside)
        rotate_pairs(source + RANK, target + RANK, cosine + angle, sine + angle, HALF, HALF_PADDED)
    else:
        source = queries + token * query_stride + head * SIZE - 2 * HALF
        target = wide + (token * heads + head - 1) * (RANK + 2 * HALF) + RANK
        rotate_pairs(source, target, cosine + angle, sine + angle, HALF, HALF_PADDED)


@triton.jit(do_not_specialize=["rows"])
def multiply_heads(
    x, weight, out, rows, columns, inner, x_stride, x_head, weight_head, weight_column, weight_inner, out_stride,
    out_head, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Compute one tile [ROWS, COLUMNS] of x Wᵀ of one head, in steps of STEP elements of the inner dimension.

    Grid: (row tiles, column tiles, heads). x: [rows, heads, inner]. weight: W, [heads, columns, inner]. out: [rows,
    heads, columns]. Strides in elements: of rows (`_stride`), heads, columns and the inner dimension; 1 where none is
    given."""
    head = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    matrix = weight + head * weight_head + column * weight_column
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, inner, STEP):
        place = start + tl.arange(0, STEP)
        at = row * x_stride + head * x_head + place[None, :]
        a = tl.load(x + at, (row < rows) & (place[None, :] < inner), 0.0)
        b = tl.load(matrix + place[:, None] * weight_inner, (place[:, None] < inner) & (column < columns), 0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    at = row * out_stride + head * out_head + column
    tl.store(out + at, total.to(out.dtype.element_ty), (row < rows) & (column < columns))
