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

#ifdef __AVX512F__
constexpr int TILE_ROWS = 12, ACCUMULATORS = 24;
#else
constexpr int TILE_ROWS = 6, ACCUMULATORS = 6;
#endif
constexpr int MOST_PANELS = 4;
constexpr long BLOCK_ROWS = 96, GROUP_PANELS = 8;  // of a work item with many rows: 128 columns
#ifdef __AVX512BF16__
constexpr bool ROUNDS_INPUT = true;  // the bfloat16 products take a bfloat16 input
constexpr long SECTION = 1024;
#else
constexpr bool ROUNDS_INPUT = false;
constexpr long SECTION = 256;
#endif
constexpr long AMX_K = 32;  // k of one AMX tile; panels are padded to it

INLINE Vec even_k(const Pairs& p) {
    Vec v;
    const IntPart* words = (const IntPart*)p.value;
    EACH v.part[i] = (Part)(words[i] << 16);
    return v;
}
INLINE Vec odd_k(const Pairs& p) {
    Vec v;
    const IntPart* words = (const IntPart*)p.value;
    EACH v.part[i] = (Part)(words[i] & int32_t(0xffff0000));
    return v;
}

// sums[r][16 p ...] += x[r][0 .. depth) times panel p, whose k-th row (pair of k for Pairs) is w[p] + k * stride.
template <class X, class W, int R, int P>
static __attribute__((noinline)) void multiply_tile(const X* const* x, const W* const* w, long stride, long depth, float* sums, long columns) {
    Vec total[R][P] = {};
    constexpr bool pairs = std::is_same_v<W, Pairs>;
    const W* panel[P];
    const X* row[R];
    UNROLL for (int p = 0; p < P; ++p) panel[p] = w[p];
    UNROLL for (int r = 0; r < R; ++r) row[r] = x[r];
    for (long k = 0; k < depth; k += pairs ? 2 : 1) {
        const long at = (pairs ? k / 2 : k) * stride;
        if constexpr (std::is_same_v<X, bfloat16>) {
#ifdef __AVX512BF16__
            UNROLL for (int p = 0; p < P; ++p) {
                const __m512bh b = (__m512bh)_mm512_loadu_si512(panel[p] + at);
                UNROLL for (int r = 0; r < R; ++r) {
                    int32_t pair;
                    std::memcpy(&pair, row[r] + k, sizeof pair);
                    total[r][p].part[0] = _mm512_dpbf16_ps(total[r][p].part[0], (__m512bh)_mm512_set1_epi32(pair), b);
                }
            }
#endif
        } else if constexpr (pairs) {
            UNROLL for (int p = 0; p < P; ++p) {
                const Vec even = even_k(panel[p][at]), odd = odd_k(panel[p][at]);
                UNROLL for (int r = 0; r < R; ++r) total[r][p] = fma(broadcast(row[r][k]), even, total[r][p]);
                UNROLL for (int r = 0; r < R; ++r) total[r][p] = fma(broadcast(row[r][k + 1]), odd, total[r][p]);
            }
        } else {
            UNROLL for (int p = 0; p < P; ++p) {
                const Vec b = load(panel[p] + at);
                UNROLL for (int r = 0; r < R; ++r) total[r][p] = fma(broadcast(row[r][k]), b, total[r][p]);
            }
        }
    }
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

// The same for any number of rows and panels.
template <class X, class W, int R = TILE_ROWS>
static void multiply(const X* const* x, long rows, const W* const* w, long panels, long stride, long depth, float* sums,
                     long columns) {
    if constexpr (R > 0) {
        for (; rows >= R; rows -= R, x += R, sums += R * columns)
            multiply_rows<X, W, R>(x, w, panels, stride, depth, sums, columns);
        multiply<X, W, R - 1>(x, rows, w, panels, stride, depth, sums, columns);
    }
}

#ifdef __AMX_BF16__
alignas(64) static const struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TILES = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

// The same in AMX tiles: 2 x 16 rows (at `x`, `x_stride` apart, zero-padded) by 2 panels.
static void multiply_amx(const bfloat16* x, long x_stride, long rows, const Pairs* const* w, long panels, long depth,
                         float* sums, long columns) {
    asm volatile("" ::: "memory");  // GCC's tile loads do not say that they read memory
    for (long p = 0; p < panels; p += 2)
        for (long r = 0; r < rows; r += 32) {
            const bool lower = r + 16 < rows, right = p + 1 < panels;
            alignas(64) float out[4][16 * LANES];
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (long k = 0; k < depth; k += AMX_K) {
                _tile_loadd(4, x + r * x_stride + k, x_stride * sizeof(bfloat16));
                _tile_loadd(6, w[p] + k / 2, sizeof(Pairs));
                _tile_dpbf16ps(0, 4, 6);
                if (right) {
                    _tile_loadd(7, w[p + 1] + k / 2, sizeof(Pairs));
                    _tile_dpbf16ps(1, 4, 7);
                }
                if (lower) {
                    _tile_loadd(5, x + (r + 16) * x_stride + k, x_stride * sizeof(bfloat16));
                    _tile_dpbf16ps(2, 5, 6);
                    if (right) _tile_dpbf16ps(3, 5, 7);
                }
            }
            _tile_stored(0, out[0], 64);
            _tile_stored(1, out[1], 64);
            _tile_stored(2, out[2], 64);
            _tile_stored(3, out[3], 64);
            for (int quarter = 0; quarter < 4; ++quarter)
                for (long i = r + quarter / 2 * 16; i < std::min(rows, r + quarter / 2 * 16 + 16); ++i)
                    if (p + quarter % 2 < panels) {
                        float* sum = sums + i * columns + (p + quarter % 2) * LANES;
                        store(sum, load(sum) + load(out[quarter] + (i - r) % 16 * LANES));
                    }
        }
}

#endif

// Memory of one thread, kept from item to item.
struct Scratch {
    std::vector<float> floats;
    std::vector<const void*> rows;
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
                            float* sums, float* work) {
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
        for (long r = 0; r < rows; ++r) row[r] = x[r] + begin;
        if (!w.bf16) {
            const float* panel_w[GROUP_PANELS];
            for (long p = 0; p < panels; ++p) panel_w[p] = (const float*)at[p] + begin * LANES;
            multiply(row, rows, panel_w, panels, LANES, depth, sums, columns);
            continue;
        }
        const Pairs* panel_w[GROUP_PANELS];
        for (long p = 0; p < panels; ++p) panel_w[p] = (const Pairs*)at[p] + begin / 2;
        if constexpr (ROUNDS_INPUT) {
            const long padded = (depth + AMX_K - 1) / AMX_K * AMX_K;
            const bfloat16* rounded[BLOCK_ROWS];
            bfloat16* next = (bfloat16*)work;
            for (long r = 0; r < (rows + 15) / 16 * 16; ++r, next += padded) {
                const long given = r < rows ? depth : 0;
                for (long k = 0; k < given; ++k) next[k] = to_bfloat16(row[r][k]);
                std::fill(next + given, next + padded, bfloat16(0));
                rounded[r] = next;
            }
#ifdef __AMX_BF16__
            multiply_amx(rounded[0], padded, rows, panel_w, panels, padded, sums, columns);
#else
            multiply(rounded, rows, panel_w, panels, 1, padded, sums, columns);
#endif
        } else if (rows <= TILE_ROWS && depth % 2 == 0) {
            multiply(row, rows, panel_w, panels, 1, depth, sums, columns);
        } else {
            for (long p = 0; p < panels; ++p) {
                for (long k = 0; k < depth; k += 2) {
                    store(work + k * LANES, even_k(panel_w[p][k / 2]));
                    store(work + (k + 1) * LANES, odd_k(panel_w[p][k / 2]));
                }
                const float* expanded = work;
                multiply(row, rows, &expanded, 1, LANES, depth, sums + p * LANES, columns);
            }
        }
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
    float* sums = scratch.take(BLOCK_ROWS * GROUP_PANELS * LANES + std::max(SECTION * LANES, BLOCK_ROWS * SECTION / 2));
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

// Packs panel `panel` of all panels of the matrices from rows [n, k] of float32 or (`mode`) bfloat16.
static void pack_panel(const Op& op, long item) {
    const Matrix& w = op.matrix;
    const long panels = (w.n + LANES - 1) / LANES, index = item / panels, panel = item % panels;
    char* out = (char*)panel_at(w, index, panel);
    const long padded = w.bf16 ? (w.k + AMX_K - 1) / AMX_K * AMX_K : w.k;
    for (long lane = 0; lane < LANES; ++lane) {
        const long n = panel * LANES + lane, source = (index * w.n + n) * w.k, given = n < w.n ? w.k : 0;
        for (long k = 0; k < padded; ++k) {
            const bool real = k < given;
            if (w.bf16)
                ((bfloat16*)out)[(k / 2 * LANES + lane) * 2 + k % 2] =
                    !real ? 0 : op.mode ? ((const bfloat16*)op.in)[source + k] : to_bfloat16(op.in[source + k]);
            else
                ((float*)out)[k * LANES + lane] =
                    !real ? 0 : op.mode ? to_float(((const bfloat16*)op.in)[source + k]) : op.in[source + k];
        }
    }
}
