// Causal grouped-query attention over KV blocks: online softmax (Milakov & Gimelshein 2018, arXiv:1805.02867) over
// sections of a fixed number of blocks, merged in the order of positions.
#pragma once
#include "product.h"

constexpr long BLOCK = LANES, SECTION_BLOCKS = 4, SECTION_TOKENS = BLOCK * SECTION_BLOCKS;
constexpr long QUERY_TILE = 16;  // consecutive tokens of a sequence that share the reading of keys and values

struct QueryTile {
    long sequence, first, count;
};

static std::vector<QueryTile> query_tiles(const Step& step) {
    std::vector<QueryTile> tiles;
    for (long s = 0; s < step.sequences; ++s)
        for (long first = step.starts[s]; first < step.starts[s + 1]; first += QUERY_TILE)
            tiles.push_back({s, first, std::min(QUERY_TILE, step.starts[s + 1] - first)});
    return tiles;
}

// One row's scores of a section, those of tokens outside [low, high) of the section masked: turns them into weights,
// and rescales what earlier sections gave.
static void update_softmax(float* scores, long blocks, long low, long high, float scale, float* out, long width,
                           float* highest, float* total) {
    alignas(64) float lane[LANES];
    for (long i = 0; i < LANES; ++i) lane[i] = i;
    const Vec lanes = load(lane), never = broadcast(-INFINITY);
    Vec most = never;
    for (long b = 0; b < blocks; ++b) {
        const Vec place = lanes + broadcast(b * BLOCK);
        Vec s = load(scores + b * BLOCK) * broadcast(scale);
        s = choose_at_least(place, low, s, never);
        s = choose_at_least(place, high, never, s);
        store(scores + b * BLOCK, s);
        most = maximum(most, s);
    }
    const float peak = std::max(*highest, largest(most));
    const Vec kept = exponential(broadcast(*highest) - broadcast(peak));
    Vec sum = load(total) * kept;
    for (long b = 0; b < blocks; ++b) {
        const Vec p = exponential(load(scores + b * BLOCK) - broadcast(peak));
        store(scores + b * BLOCK, p);
        sum = sum + p;
    }
    store(total, sum);
    *highest = peak;
    for (long d = 0; d < width; d += LANES) store(out + d, load(out + d) * kept);
}

// One item: the query heads of key-value head `head` for the tokens of a tile.
template <class W>
static void attend(const Op& op, const Step& step, const QueryTile& tile, long head, Scratch& scratch) {
    const Cache& cache = op.cache;
    const long size = cache.head_dim, width = (size + LANES - 1) / LANES * LANES;
    const long group = op.heads / cache.kv_heads, rows = tile.count * group;
    const int32_t* blocks = step.block_tables + tile.sequence * step.table_width;
    const int32_t* positions = step.positions + tile.first;
    float* scores = scratch.take(rows * (SECTION_TOKENS + width + 2 * LANES));
    float *out = scores + rows * SECTION_TOKENS, *total = out + rows * width, *highest = total + rows * LANES;
    std::fill_n(out, rows * width, 0.0f), std::fill_n(total, rows * LANES, 0.0f);
    std::fill_n(highest, rows, -INFINITY);
    std::vector<const float*> query(rows), weight(rows);
    for (long r = 0; r < rows; ++r) {
        query[r] = op.in + (tile.first + r / group) * op.in_stride + (head * group + r % group) * size;
        weight[r] = scores + r * SECTION_TOKENS;
    }
    const auto low_of = [&](long t) { return op.window ? std::max<long>(0, positions[t] - op.window + 1) : 0; };
    const auto high_of = [&](long t) { return long(positions[t]) + 1; };
    for (long begin = low_of(0) / SECTION_TOKENS * SECTION_TOKENS; begin < high_of(tile.count - 1);
         begin += SECTION_TOKENS) {
        long first = 0, last = tile.count;  // the tokens that see anything of this section
        while (high_of(first) <= begin) ++first;
        while (low_of(last - 1) >= begin + SECTION_TOKENS) --last;
        const auto low = [&](long t) { return std::max(0L, low_of(t) - begin); };
        const auto high = [&](long t) { return std::min(SECTION_TOKENS, high_of(t) - begin); };
        const long count = (high(last - 1) + BLOCK - 1) / BLOCK;
        const W *keys[SECTION_BLOCKS], *values[SECTION_BLOCKS];
        for (long b = 0; b < count; ++b) {
            const long block = blocks[begin / BLOCK + b] * cache.kv_heads + head;
            keys[b] = (const W*)cache.keys + block * size * BLOCK;
            values[b] = (const W*)cache.values + block * width * BLOCK;
        }
        std::fill_n(scores + first * group * SECTION_TOKENS, (last - first) * group * SECTION_TOKENS, 0.0f);
        multiply(query.data() + first * group, (last - first) * group, keys, count, LANES, size,
                 scores + first * group * SECTION_TOKENS, SECTION_TOKENS);
        for (long r = first * group; r < last * group; ++r)
            update_softmax(scores + r * SECTION_TOKENS, count, low(r / group), high(r / group), op.scale,
                           out + r * width, width, highest + r, total + r * LANES);
        for (long b = 0; b < count; ++b) {
            const auto from = [&](long t) { return std::max(low(t), b * BLOCK); };
            const auto to = [&](long t) { return std::min(high(t), b * BLOCK + BLOCK); };
            for (long t = first, end; t < last; t = end) {  // tokens that see the same part of the block
                for (end = t + 1; end < last && from(end) == from(t) && to(end) == to(t); ++end) {}
                if (to(t) <= from(t)) continue;
                for (long r = t * group; r < end * group; ++r) weight[r] = scores + r * SECTION_TOKENS + from(t);
                const W* panel[MOST_PANELS];
                for (long d = 0; d < width; d += MOST_PANELS * LANES) {
                    const long panels = std::min<long>(MOST_PANELS, (width - d) / LANES);
                    for (long p = 0; p < panels; ++p)
                        panel[p] = values[b] + (from(t) - b * BLOCK) * width + d + p * LANES;
                    multiply(weight.data() + t * group, (end - t) * group, panel, panels, width, to(t) - from(t),
                             out + t * group * width + d, width);
                }
            }
        }
    }
    for (long r = 0; r < rows; ++r) {
        float* to = op.out + (tile.first + r / group) * op.out_stride + (head * group + r % group) * size;
        const Vec norm = broadcast(sum(load(total + r * LANES)));
        for (long d = 0; d < size; d += LANES) store(to + d, load(out + r * width + d) / norm, size - d);
    }
}
