// The matrix product: rows of x times column panels. Every output element is a sum of partial sums over sections of
// `SECTION` k, each one chain of fused multiply-adds (or pair products) in the order of k, whatever tile computes it.
#pragma once
#include <algorithm>
#include <vector>

#include "structures.h"
#include "vectors.h"

// True if the macro `name` is defined as 1.
#define TEXT(x) #x
#define DEFINED(name) (TEXT(name)[0] == '1')

struct alignas(64) Pairs { bfloat16 value[2 * LANES]; };  // 16 columns x 2 consecutive k

// Most accumulators in registers, for weights of type W, and most rows of a tile: on AVX2 pairs leave fewer of 16
// registers; AVX-512 leaves some for 8 broadcast inputs.
template <class W> constexpr int ACCUMULATORS = PARTS == 1 ? 18 : std::is_same_v<W, Pairs> ? 5 : 6;
template <class W> constexpr int TILE_ROWS = std::min(8, ACCUMULATORS<W>);
// Most pairs of panels that a thread multiplies by a row block at once, and of those by few rows; bytes from where a
// tile reads weights that no other tile reads to what it prefetches.
constexpr long MOST_PAIRS = 4, MOST_PAIRS_OF_FEW_ROWS = 8, FEW_ROWS = 4, STREAM_AHEAD = 4096;
constexpr long BLOCK_ROWS = 256, SUMS = BLOCK_ROWS * 2 * MOST_PAIRS * LANES;  // of most work items
// ROUNDS: products with bfloat16 weights take inputs rounded to bfloat16.
constexpr bool ROUNDS = DEFINED(__AVX512BF16__), AMX = DEFINED(__AMX_BF16__);
constexpr long SECTION = ROUNDS ? 1024 : 256, AMX_K = 32;  // k of one AMX tile, to which panels are padded

template <class W> INLINE Vec load_k(const W* p, bool) { return load(p); }
INLINE Vec load_k(const Pairs* p, bool odd) {  // the even or the odd k
    Vec v;
    asm volatile("" : "+r"(p));  // reads both from memory: what is kept from the even k would take registers from sums
    EACH v.part[i] = (Part)(odd ? ((const IntPart*)p)[i] & int32_t(0xffff0000) : ((const IntPart*)p)[i] << 16);
    return v;
}

// sums[r][16 p ...] (+)= x[r][0 .. depth) times panel p, whose k-th row (pair of k for Pairs) is w[p] + k * stride.
// `fresh`: sums are overwritten. Meanwhile it prefetches the panels `next`, or if `Far` is positive, what is so many
// bytes ahead in them, past the last cache (NTA): weights that are read once in a step would evict all else from it,
// such as keys and values. If `Far` is negative, nothing: a prefetch takes the turn of a load. Not inlined: what
// surrounds it would take registers from the sums.
template <class X, class W, int R, int P, long Far>
[[gnu::noinline]] static void multiply_tile(const X* const* x, const W* const* w, const W* const* next, long stride,
                                            long depth, float* sums, long columns, bool fresh) {
    Vec total[R][P] = {};
    constexpr bool pairs = std::is_same_v<W, Pairs>;
    for (long k = 0; k < depth; k += 1 + pairs) {
        // After an odd k panels and rounded rows have a 0.
        const long at = k / (1 + pairs) * stride, second = std::min(k + 1, depth - 1);
        UNROLL for (int p = 0; p < P && Far >= 0; ++p)
            _mm_prefetch((char*)(next[p] + at) + Far, Far ? _MM_HINT_NTA : _MM_HINT_T1);
        UNROLL for (int p = 0; p < P; ++p) {
#ifdef __AVX512BF16__  // VDPBF16PS adds x[0] times the even and x[1] times the odd k
            if constexpr (pairs && std::is_same_v<X, bfloat16>) {
                const __m512bh weights = (__m512bh)_mm512_loadu_si512(w[p] + at);
                UNROLL for (int r = 0; r < R; ++r) {
                    const __m512bh both = (__m512bh)_mm512_broadcastd_epi32(_mm_loadu_si32(x[r] + k));
                    total[r][p].part[0] = _mm512_dpbf16_ps(total[r][p].part[0], both, weights);
                }
                continue;
            }
#endif
            UNROLL for (int odd = 0; odd <= pairs; ++odd) {
                const Vec weights = load_k(w[p] + at, odd);
                UNROLL for (int r = 0; r < R; ++r)
                    total[r][p] = fma(broadcast(to_float(x[r][odd ? second : k])), weights, total[r][p]);
            }
        }
    }
    UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int p = 0; p < P; ++p) {
            float* sum = sums + r * columns + p * LANES;
            store(sum, fresh ? total[r][p] : load(sum) + total[r][p]);
        }
}

// The same for any number of rows, in tiles of nearly equal height (at most R), and of panels, which stay in the first
// cache for all rows. A tile takes at most `Panels` panels; the first tile of rows prefetches the panels `next`.
template <int Panels, class X, class W, long Far = 0, int R = TILE_ROWS<W>> static void multiply(
    const X* const* x, long rows, const W* const* w, const W* const* next, long panels, long stride, long depth,
    float* sums, long columns, bool fresh = false) {
    if constexpr (R > 0) {
        constexpr int fit = std::clamp(ACCUMULATORS<W> / R, 1, Panels), most = PARTS == 1 && fit == 3 ? 2 : fit;
        long end = 0;  // of the rows in tiles of height R
        for (long n; (n = rows - end) >= R && (n - 1) / ((n - 1) / TILE_ROWS<W> + 1) + 1 == R;) end += R;
        for (long p = 0, count; end && p < panels; p += count) {
            count = p + most <= panels ? most : 1;
            const auto top = count > 1 ? multiply_tile<X, W, R, most, Far> : multiply_tile<X, W, R, 1, Far>;
            const auto low = count > 1 ? multiply_tile<X, W, R, most, -1> : top;
            for (long r = 0; r < end; r += R)
                (r ? low : top)(x + r, w + p, next + p, stride, depth, sums + r * columns + p * LANES, columns, fresh);
        }
        multiply<Panels, X, W, Far, R - 1>(x + end, rows - end, w, end ? w : next, panels, stride, depth,
                                           sums + end * columns, columns, fresh);
    }
}

// Elements of a row that is rounded for a product: k padded for tiles, and not a multiple of a page, so that the rows
// of a tile are in different sets of a cache.
static long rounded_stride(long k) { return (k + AMX_K - 1) / AMX_K * AMX_K + AMX_K; }

// out[0 .. depth) = x rounded to bfloat16, then zeros up to a multiple of AMX_K. Both instructions that read it take
// denormal numbers as zero, as this rounding does.
static void round_row([[maybe_unused]] const float* x, long depth, [[maybe_unused]] bfloat16* out) {
    for (long k = 0; k < depth; k += AMX_K) {
#ifdef __AVX512BF16__
        const uint32_t kept = depth - k < AMX_K ? (1u << (depth - k)) - 1 : ~0u;
        const auto high = _mm512_maskz_loadu_ps(kept >> LANES, x + k + LANES), low = _mm512_maskz_loadu_ps(kept, x + k);
        _mm512_storeu_si512(out + k, (__m512i)_mm512_cvtne2ps_pbh(high, low));
#endif
    }
}

#ifdef __AMX_BF16__
// Palette 1; bytes of a row and rows of the 8 tiles.
alignas(64) static const uint64_t TILES[8] = {1, 0, 0x40004000400040, 0x40004000400040, 0, 0, 0x1010101010101010};

// The same by AMX, which adds all sections of k in one chain: two tiles of 16 rows times two panels; of an odd number
// of panels the last is multiplied twice. x, in rows of `x_stride`, and sums have memory for a multiple of 32 rows.
static void multiply_by_amx(const bfloat16* x, long x_stride, long rows, const Pairs* const* w, long panels,
                            long depth, float* sums, long columns, bool fresh) {
    const long bytes = columns * sizeof(float), x_bytes = x_stride * sizeof(bfloat16), w_bytes = 2 * sizeof(Pairs);
    _tile_loadconfig(&TILES);
    asm volatile("" ::: "memory");  // GCC's tile loads do not say that they read memory
    for (long p = 0; p < panels; p += 2)
        for (long r = 0; r < rows; r += 32) {
            const Pairs *a = w[p], *b = w[std::min(p + 1, panels - 1)];
            const bfloat16* in = x + r * x_stride;
            float *top = sums + r * columns + p * LANES, *low = top + 16 * columns;
            _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
            if (!fresh) {
                _tile_loadd(0, top, bytes); _tile_loadd(1, top + LANES, bytes);
                _tile_loadd(2, low, bytes); _tile_loadd(3, low + LANES, bytes);
            }
            for (long k = 0; k < depth; k += AMX_K) {
                _tile_loadd(6, a + k, w_bytes); _tile_loadd(4, in + k, x_bytes);
                _tile_loadd(7, b + k, w_bytes); _tile_loadd(5, in + 16 * x_stride + k, x_bytes);
                _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
            }
            _tile_stored(0, top, bytes); _tile_stored(2, low, bytes);
            if (p + 1 < panels) { _tile_stored(1, top + LANES, bytes); _tile_stored(3, low + LANES, bytes); }
        }
}
#endif

// Lengthens `memory` to `size` if it is shorter, without what it holds: old and new memory do not exist together.
template <class T> static T* grow(std::vector<T>& memory, long size) {
    if (long(memory.size()) < size) memory = std::vector<T>(), memory.resize(size);
    return memory.data();
}

// Memory of one thread, kept from item to item.
static float* take_scratch(long count) {
    thread_local std::vector<Pairs> memory;
    return (float*)grow(memory, count / LANES + 1);
}

// The first line (64 bytes) of a panel, of which each is two lines after the one before.
static const char* panel_at(const Matrix& w, long index, long panel) {
    const long lines = w.bf16 ? (w.k + AMX_K - 1) / AMX_K * AMX_K : 2 * w.k;  // of two panels
    return (const char*)w.data + index * w.stride + (panel / 2 * lines + panel % 2) * 64;
}

// sums (+)= x times `count` panels of matrix `index` from `panel` on. x: rows of float, or those that `round_row` made,
// for products that take them.
template <class W> static void multiply_panels(const void* const* x, long rows, const Matrix& w, long index, long panel,
                                              long count, float* sums, long columns, bool fresh) {
    constexpr bool pairs = std::is_same_v<W, Pairs>, rounds = ROUNDS && pairs;
    using X = std::conditional_t<rounds, bfloat16, float>;
    const W* at[2 * MOST_PAIRS_OF_FEW_ROWS + 2]; const X* row[BLOCK_ROWS];
    for (long begin = 0; begin < w.k; begin += SECTION, fresh = false) {
        const long depth = std::min(SECTION, w.k - begin), stride = 2 * (64 / sizeof(W));
        for (long p = 0; p < count + 2; ++p)  // those after the last panel are only prefetched
            at[p] = (const W*)panel_at(w, index, panel + p) + begin / (1 + pairs) * stride;
        for (long r = 0; r < rows; ++r) row[r] = (const X*)x[r] + begin;
        if constexpr (AMX && pairs)
            multiply_by_amx(row[0], rounded_stride(w.k), rows, at, count, depth, sums, columns, fresh);
        // One row of float32 is as fast as memory without prefetches, and slower with them.
        else if (rows <= (PARTS == 1 ? TILE_ROWS<W> : FEW_ROWS) && (pairs || rows > 1))
            multiply<2, X, W, STREAM_AHEAD>(row, rows, at, at, count, stride, depth, sums, columns, fresh);
        else multiply<2>(row, rows, at, at + (rows > FEW_ROWS) * 2, count, stride, depth, sums, columns, fresh);
    }
}

static long count_rows(const Op& op, const Step& step) { return op.outputs ? step.outputs : step.token_count; }

// Work items of a product with one matrix, of which each is a pair of panels times a row block: groups of pairs x row
// blocks x the pairs of a group, so that several row blocks read the panels of a group from memory once. The last items
// may be empty. Inputs of the product are the rows of x, once for each matrix that reads other columns (`in_step`), or
// those of the sorted assignments to experts (`order`); `begin` is the matrix's first.
struct Items {
    long index, panels, begin, rows, blocks, group;  // index: of the matrix
    Items(const Op& op, const Step& step, long index)
        : index(index), panels((op.matrix.n + LANES - 1) / LANES),
          begin(op.in_step ? index * count_rows(op, step) : op.routing.order && index ? op.routing.ends[index - 1] : 0),
          rows(op.routing.order ? op.routing.ends[index] - begin : count_rows(op, step)),
          blocks((rows + BLOCK_ROWS - 1) / BLOCK_ROWS), group(blocks > 1 ? MOST_PAIRS : (panels + 1) / 2) {}
    long count() const { return (panels + 2 * group - 1) / (2 * group) * blocks * group; }
};

// Input `i` of a product, of which x has `rows`. Inputs of experts' first products (`mode`) are those of tokens.
static const float* input_of(const Op& op, long i, long rows) {
    const long place = op.routing.order ? op.routing.order[i] / (op.mode ? op.routing.top_k : 1) : i % rows;
    return op.in + place * op.in_stride + i / rows * op.in_step;
}

// activation(gate) * up, of which gate is cut at `softcap` and up at ± `softcap`, then 1 added to it, if that is not 0.
static Vec activate(const Op& op, Vec gate, Vec up) {
    const Vec limit = broadcast(op.softcap), zero = broadcast(0.0f), one = broadcast(1.0f);
    if (op.softcap != 0) gate = minimum(limit, gate), up = maximum(zero - limit, minimum(limit, up)) + one;
    if (op.activation == SILU) gate = gate * sigmoid(gate * broadcast(op.scale));
    if (op.activation == GELU) gate = gelu(gate);
    if (op.activation == GELU_TANH) gate = gelu_tanh(gate);
    if (op.activation == RELU || op.activation == RELU2) gate = maximum(gate, zero);
    if (op.activation == RELU2) gate = gate * gate;
    return op.gated ? gate * up : gate;
}

// Some items of a row block and group: out[row] (+)= activation(x[row] Wᵀ + bias). The first products of experts may
// have factors, `weight` of each assignment (Llama 4). If `gated`, panels of gate and up alternate. `rounded`: the
// inputs, if the product takes rounded ones. Products of whole panels without `more` are summed in `out` itself, but by
// AMX, whose tiles have 16 rows.
static void multiply_items(const Op& op, const Items& items, long item, long count, const bfloat16* rounded) {
    const long index = items.index, group = item / items.group, block = group % items.blocks * BLOCK_ROWS;
    const long panel = 2 * (group / items.blocks * items.group + item % items.group), first = items.begin + block;
    const long rows = std::min(BLOCK_ROWS, items.rows - block), step = op.gated ? 2 * LANES : LANES;
    const long panels = std::min(2 * count, items.panels - panel), columns = panels * LANES;
    const void* x[BLOCK_ROWS]; float* out[BLOCK_ROWS]; long place[BLOCK_ROWS];
    const bool more = op.bias || op.activation || op.routing.order || op.matrix.n % LANES || (AMX && op.matrix.bf16);
    for (long r = 0, i = first; r < rows; ++r, ++i) {
        place[r] = op.routing.order ? op.routing.order[i] : block + r;
        out[r] = op.out + place[r] * op.out_stride + index * op.out_step + panel * LANES * LANES / step;
        x[r] = rounded ? (void*)(rounded + i * rounded_stride(op.matrix.k)) : input_of(op, i, items.rows);
    }
    const long at_once = rows > 8 || op.matrix.k <= SECTION ? panels : 2;  // few rows: panels in the order of memory
    float* sums = more ? take_scratch(SUMS) : out[0];
    const auto product = op.matrix.bf16 ? multiply_panels<Pairs> : multiply_panels<float>;
    for (long p = 0; p < panels; p += at_once)
        product(x, rows, op.matrix, index, panel + p, std::min(at_once, panels - p), sums + p * LANES,
                more ? columns : op.out_stride, more || !op.accumulate);
    for (long r = 0; r < rows && more; ++r)
        for (long c = 0; c < columns; c += step) {
            const auto result = [&](long at) {
                const long column = panel * LANES + at;
                const Vec y = load(sums + r * columns + at), factor = broadcast(op.weight ? op.weight[place[r]] : 1.0f);
                return (op.bias ? y + load(op.bias + index * op.matrix.n + column, op.matrix.n - column) : y) * factor;
            };
            const Vec y = activate(op, result(c), op.gated ? result(c + LANES) : Vec{});
            store_or_add(out[r] + c * LANES / step, y, op.size - (panel * LANES + c) * LANES / step, op.accumulate);
        }
}
