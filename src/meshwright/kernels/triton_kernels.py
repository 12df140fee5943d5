"""Triton kernels of serving on a GPU. Import on CUDA only. Torch-free.

The bits of a row depend on that row and on the shapes of the weights: tiles and sections have sizes that no batch
changes, and partial results are added in a fixed order. Shapes and arguments: `device_operations.py`.

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
