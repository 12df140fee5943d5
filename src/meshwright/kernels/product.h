// The matrix product: rows of x times column panels. Every output element is a sum of partial sums over sections of
// `SECTION` k, each one chain of fused multiply-adds (or pair products) in the order of k, whatever tile computes it.
#pragma once
#include <algorithm>
#include <vector>

#include "structures.h"
#include "vectors.h"

struct Pairs {  // 16 columns x 2 consecutive k, in bfloat16
    bfloat16 value[2 * LANES];
};

// Most rows of a tile and accumulators in registers, for weights of type W; on AVX2 pairs leave fewer of 16 registers.
#ifdef __AVX512F__
template <class W> constexpr int TILE_ROWS = 8;
constexpr int ACCUMULATORS = 18;  // leaves registers for 8 broadcast inputs
#else
template <class W> constexpr int TILE_ROWS = std::is_same_v<W, Pairs> ? 5 : 6;
constexpr int ACCUMULATORS = 6;
#endif
constexpr int MOST_PANELS = 4;
constexpr long BLOCK_ROWS = 96, GROUP_PANELS = 8;  // of a work item with many rows: 128 columns
#ifdef __AVX512BF16__
constexpr long SECTION = 1024;  // its products take bfloat16 inputs, rounded section by section
#else
constexpr long SECTION = 256;
#endif
constexpr long AMX_K = 32;  // k of one AMX tile; panels are padded to it

INLINE Vec load(const Pairs* p) {  // the even k
    Vec v;
    EACH v.part[i] = (Part)(((const IntPart*)p)[i] << 16);
    return v;
}
INLINE Vec load_odd(const Pairs* p) {
    Vec v;
    EACH v.part[i] = (Part)(((const IntPart*)p)[i] & int32_t(0xffff0000));
    return v;
}

#ifdef __AVX512BF16__
// VDPBF16PS: adds x[0] times the even and x[1] times the odd k.
INLINE Vec add_pairs(Vec total, const bfloat16* x, const Pairs* w) {
    int32_t pair;
    std::memcpy(&pair, x, sizeof pair);
    const __m512bh both = (__m512bh)_mm512_set1_epi32(pair), weights = (__m512bh)_mm512_loadu_si512(w);
    total.part[0] = _mm512_dpbf16_ps(total.part[0], both, weights);
    return total;
}
#endif

// sums[r][16 p ...] += x[r][0 .. depth) times panel p, whose k-th row (pair of k for Pairs) is w[p] + k * stride.
template <class X, class W, int R, int P>
static void multiply_tile(const X* const* x, const W* const* w, long stride, long depth, float* sums, long columns) {
    Vec total[R][P] = {};
    constexpr bool pairs = std::is_same_v<W, Pairs>;
    const W* panel[P];
    const X* row[R];
    UNROLL for (int p = 0; p < P; ++p) panel[p] = w[p];
    UNROLL for (int r = 0; r < R; ++r) row[r] = x[r];
    for (long k = 0; k + pairs < depth; k += 1 + pairs) {
        const long at = k / (1 + pairs) * stride;
        UNROLL for (int p = 0; p < P; ++p) {
#ifdef __AVX512BF16__
            if constexpr (std::is_same_v<X, bfloat16>) {
                UNROLL for (int r = 0; r < R; ++r) total[r][p] = add_pairs(total[r][p], row[r] + k, panel[p] + at);
                continue;
            }
#endif
            const Vec even = load(panel[p] + at);
            UNROLL for (int r = 0; r < R; ++r) total[r][p] = fma(broadcast(row[r][k]), even, total[r][p]);
            if constexpr (pairs) {
                const Vec odd = load_odd(panel[p] + at);
                UNROLL for (int r = 0; r < R; ++r) total[r][p] = fma(broadcast(row[r][k + 1]), odd, total[r][p]);
            }
        }
    }
    if (pairs && std::is_same_v<X, float> && depth % 2)  // an odd k is the last of the matrix
        UNROLL for (int p = 0; p < P; ++p)
            UNROLL for (int r = 0; r < R; ++r)
                total[r][p] = fma(broadcast(row[r][depth - 1]), load(panel[p] + depth / 2 * stride), total[r][p]);
    UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int p = 0; p < P; ++p) {
            float* sum = sums + r * columns + p * LANES;
            store(sum, load(sum) + total[r][p]);
        }
}

template <class X, class W, int R>
static void multiply_rows(const X* const* x, const W* const* w, long panels, long stride, long depth, float* sums,
                          long columns) {
    constexpr int most = std::clamp(ACCUMULATORS / R, 1, MOST_PANELS);
    long p = 0;
    for (; p + most <= panels; p += most)
        multiply_tile<X, W, R, most>(x, w + p, stride, depth, sums + p * LANES, columns);
    for (; p < panels; ++p) multiply_tile<X, W, R, 1>(x, w + p, stride, depth, sums + p * LANES, columns);
}

// The same for any number of rows, in tiles of nearly equal height (at most R), and of panels.
template <class X, class W, int R = TILE_ROWS<W>>
static void multiply(const X* const* x, long rows, const W* const* w, long panels, long stride, long depth, float* sums,
                     long columns) {
    if constexpr (R > 0) {
        for (long tiles; rows && (tiles = (rows - 1) / TILE_ROWS<W> + 1, (rows - 1) / tiles + 1 == R); rows -= R) {
            multiply_rows<X, W, R>(x, w, panels, stride, depth, sums, columns);
            x += R, sums += R * columns;
        }
        multiply<X, W, R - 1>(x, rows, w, panels, stride, depth, sums, columns);
    }
}

#ifdef __AMX_BF16__
alignas(64) static const struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TILES = {1, 0, {}, {64, 64, 64, 64, 64}, {16, 16, 16, 16, 16}};

// The same in AMX tiles of 16 rows (at `x`, `x_stride` apart, zero-padded), two panels at a time.
static void multiply_amx(const bfloat16* x, long x_stride, long rows, const Pairs* const* w, long panels, long depth,
                         float* sums, long columns) {
    asm volatile("" ::: "memory");  // GCC's tile loads do not say that they read memory
    for (long p = 0; p < panels; p += 2)
        for (long r = 0; r < rows; r += 16) {
            const bool second = p + 1 < panels;
            alignas(64) float out[2][16][LANES];
            _tile_zero(0);
            _tile_zero(1);
            for (long k = 0; k < depth; k += AMX_K) {
                _tile_loadd(2, x + r * x_stride + k, x_stride * sizeof(bfloat16));
                _tile_loadd(3, w[p] + k / 2, sizeof(Pairs));
                _tile_dpbf16ps(0, 2, 3);
                if (second) {
                    _tile_loadd(4, w[p + 1] + k / 2, sizeof(Pairs));
                    _tile_dpbf16ps(1, 2, 4);
                }
            }
            _tile_stored(0, out[0], 64);
            _tile_stored(1, out[1], 64);
            for (long i = 0; i < std::min(16L, rows - r); ++i)
                for (int panel = 0; panel < 1 + second; ++panel) {
                    float* sum = sums + (r + i) * columns + (p + panel) * LANES;
                    store(sum, load(sum) + load(out[panel][i]));
                }
        }
}
#endif

// Memory of one thread, kept from item to item.
struct Scratch {
    std::vector<float> floats;
    float* take(long count) {
        if (long(floats.size()) < count + 16) floats.resize(count + 16);
        return (float*)((uintptr_t(floats.data()) + 63) / 64 * 64);
    }
};

static const char* panel_at(const Matrix& w, long index, long panel) {
    const long bytes = w.bf16 ? (w.k + AMX_K - 1) / AMX_K * AMX_K * LANES * 2 : w.k * LANES * 4;
    return (const char*)w.data + index * w.stride + panel * bytes;
}

// sums[rows][16 panels] = x times the `panels` panels of matrix `index` from `panel` on.
static void multiply_panels(const float* const* x, long rows, const Matrix& w, long index, long panel, long panels,
                            float* sums, [[maybe_unused]] float* work) {
    const long columns = panels * LANES;
    std::fill_n(sums, rows * columns, 0.0f);
    const char* at[GROUP_PANELS];
    for (long p = 0; p < panels; ++p) at[p] = panel_at(w, index, panel + p);
    const float* row[BLOCK_ROWS];
#ifdef __AMX_BF16__
    if (w.bf16) _tile_loadconfig(&TILES);
#endif
    for (long begin = 0; begin < w.k; begin += SECTION) {
        const long depth = std::min(SECTION, w.k - begin);
        const float* floats[GROUP_PANELS];
        const Pairs* pairs[GROUP_PANELS];
        for (long r = 0; r < rows; ++r) row[r] = x[r] + begin;
        for (long p = 0; p < panels; ++p) {
            floats[p] = (const float*)at[p] + begin * LANES;
            pairs[p] = (const Pairs*)at[p] + begin / 2;
        }
        if (!w.bf16) {
            multiply(row, rows, floats, panels, LANES, depth, sums, columns);
            continue;
        }
#ifdef __AVX512BF16__
        const long padded = (depth + AMX_K - 1) / AMX_K * AMX_K;
        const bfloat16* rounded[BLOCK_ROWS];
        bfloat16* next = (bfloat16*)work;
        for (long r = 0; r < (rows + 15) / 16 * 16; ++r, next += padded) {
            rounded[r] = next;
            for (long k = 0; k < padded; ++k) next[k] = r < rows && k < depth ? to_bfloat16(row[r][k]) : 0;
        }
#ifdef __AMX_BF16__
        multiply_amx(rounded[0], padded, rows, pairs, panels, padded, sums, columns);
#else
        multiply(rounded, rows, pairs, panels, 1, padded, sums, columns);
#endif
#else
        multiply(row, rows, pairs, panels, 1, depth, sums, columns);
#endif
    }
#ifdef __AMX_BF16__
    if (w.bf16) _tile_release();
#endif
}

// Work items of a product: row blocks x groups of panels. Smaller groups where there are few.
struct Items {
    long rows, panels, block_rows, group, row_blocks, groups;
    Items(long rows, long n, long threads) : rows(rows), panels((n + LANES - 1) / LANES) {
        row_blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
        block_rows = row_blocks ? (rows + row_blocks - 1) / row_blocks : 0;
        for (group = GROUP_PANELS; group > 1 && row_blocks * (panels / group) < 4 * threads; group /= 2) {}
        groups = (panels + group - 1) / group;
    }
    long count() const { return row_blocks * groups; }
};

// One item: out[place[r]] (+)= x[source[r]] Wᵀ + bias, for rows given by `find`: r -> (input row, output row).
template <class Find>
static void multiply_item(const Op& op, const Items& items, long item, long index, Scratch& scratch, Find find) {
    const long first = item % items.row_blocks * items.block_rows, panel = item / items.row_blocks * items.group;
    const long rows = std::min(items.block_rows, items.rows - first);
    const long panels = std::min(items.group, items.panels - panel), columns = panels * LANES;
    const float* x[BLOCK_ROWS];
    float* out[BLOCK_ROWS];
    for (long r = 0; r < rows; ++r) {
        const auto [source, place] = find(first + r);
        x[r] = op.in + source * op.in_stride;
        out[r] = op.out + place * op.out_stride;
    }
    float* sums = scratch.take(BLOCK_ROWS * GROUP_PANELS * LANES + BLOCK_ROWS * SECTION / 2);
    multiply_panels(x, rows, op.matrix, index, panel, panels, sums, sums + BLOCK_ROWS * GROUP_PANELS * LANES);
    for (long r = 0; r < rows; ++r)
        for (long c = 0; c < columns; c += LANES) {
            const long column = panel * LANES + c, count = op.matrix.n - column;
            Vec y = load(sums + r * columns + c);
            if (op.bias) y = y + load(op.bias + column, count);
            if (op.accumulate) y = load(out[r] + column, count) + y;
            store(out[r] + column, y, count);
        }
}

// Packs one panel of all panels of the matrices from rows [n, k] of float32 or (`mode`) bfloat16.
static void pack_panel(const Op& op, long item) {
    const Matrix& w = op.matrix;
    const long panels = (w.n + LANES - 1) / LANES, index = item / panels, panel = item % panels;
    const long padded = w.bf16 ? (w.k + AMX_K - 1) / AMX_K * AMX_K : w.k;
    char* out = (char*)panel_at(w, index, panel);
    for (long lane = 0; lane < LANES; ++lane) {
        const long n = panel * LANES + lane, source = (index * w.n + n) * w.k;
        for (long k = 0; k < padded; ++k) {
            const bool real = n < w.n && k < w.k;
            const float x = !real ? 0 : op.mode ? to_float(((const bfloat16*)op.in)[source + k]) : op.in[source + k];
            if (w.bf16) ((bfloat16*)out)[(k / 2 * LANES + lane) * 2 + k % 2] = to_bfloat16(x);
            else ((float*)out)[k * LANES + lane] = x;
        }
    }
}
