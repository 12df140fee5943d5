// Causal grouped-query attention over KV blocks: online softmax (Milakov & Gimelshein 2018, arXiv:1805.02867) over
// sections of a fixed number of blocks. Sections make up spans of fixed length, whose results are merged in the order
// of positions: whichever threads compute the spans of a long context, the sums are the same.
#pragma once
#include "product.h"

constexpr long BLOCK = LANES, SECTION_TOKENS = 4 * BLOCK, SPAN_TOKENS = 16 * SECTION_TOKENS;
constexpr long MOST_PARTIALS = 2 << 20;  // floats
constexpr long QUERY_TILE = 16;  // consecutive tokens of a sequence that share the reading of keys and values

struct QueryTile { long sequence, first, count; };

// Floats of the result of some keys for one query: the highest score [LANES, the first used], the sum of the weights by
// lane [LANES], the weighted values [head size, padded].
static long partial_floats(long head_dim) { return 2 * LANES + (head_dim + LANES - 1) / LANES * LANES; }

// One row's scores of a section, capped if `softcap` is not 0, those of tokens outside [low, high) of the section
// masked: turns them into weights, and rescales what earlier sections gave.
static void update_softmax(const Op& op, float* scores, long blocks, long low, long high, float* sums) {
    for (long b = 0; b < blocks; ++b)
        store(scores + b * BLOCK, softcap(load(scores + b * BLOCK) * broadcast(op.scale), op.softcap));
    std::fill_n(scores, low, -INFINITY);
    std::fill(scores + high, scores + blocks * BLOCK, -INFINITY);
    Vec most = broadcast(-INFINITY);
    for (long b = 0; b < blocks; ++b) most = maximum(most, load(scores + b * BLOCK));
    const float peak = std::max(sums[0], largest(most));
    const Vec kept = exponential(broadcast(sums[0] - peak));
    for (long i = LANES; i < partial_floats(op.cache.head_dim); i += LANES) store(sums + i, load(sums + i) * kept);
    for (long b = 0; b < blocks; ++b) {
        const Vec p = exponential(load(scores + b * BLOCK) - broadcast(peak));
        store(scores + b * BLOCK, p);
        store(sums + LANES, load(sums + LANES) + p);
    }
    sums[0] = peak;
}

// Adds the result of later keys, none of which may have been visible.
static void merge(float* sums, const float* more, long floats) {
    const float peak = std::max(sums[0], more[0]);  // the exponential of -inf - -inf is 0
    const Vec kept = exponential(broadcast(sums[0] - peak)), added = exponential(broadcast(more[0] - peak));
    for (long i = LANES; i < floats; i += LANES) store(sums + i, load(sums + i) * kept + load(more + i) * added);
    sums[0] = peak;
}

// The first position that the token at `position` sees, in its window or (`mode`) its chunk of as many positions.
static long first_visible(const Op& op, long position) {
    return op.mode ? position / op.window * op.window : std::max(0L, position - op.window + 1);
}

// The query heads of key-value head `head` for the tokens of a tile, over one span: a result for each row at `sums`.
// scores: [rows][SECTION_TOKENS], overwritten.
template <class W> static void attend_span(const Op& op, const Step& step, const QueryTile& tile, long head, long span,
                                          float* sums, float* scores) {
    const Cache& cache = op.cache;
    const long size = cache.head_dim, floats = partial_floats(size), width = floats - 2 * LANES;
    const long group = op.heads / cache.kv_heads, rows = tile.count * group;
    const int32_t* blocks = step.block_tables + (cache.table * step.sequences + tile.sequence) * step.table_width;
    const int32_t* positions = step.positions + tile.first;
    const long parts = ((cache.keys ? size : op.first) + LANES - 1) / LANES;
    // Latent attention multiplies the cached vectors, which are rows, by panels of 16 queries.
    const long panels = cache.keys ? 0 : (rows + LANES - 1) / LANES, columns = panels * LANES;
    thread_local std::vector<float> packed;  // those, then the scores of a section
    packed.assign(columns * (size + SECTION_TOKENS), 0.0f);
    std::vector<const float*> query(rows), weight(rows), queries(panels);
    std::fill_n(sums, rows * floats, 0.0f);
    for (long r = 0; r < rows; ++r) {
        sums[r * floats] = -INFINITY;
        query[r] = op.in + (tile.first + r / group) * op.in_stride + (head * group + r % group) * size;
        float* to = packed.data() + r / LANES * size * LANES;
        for (long d = 0; d < size && panels; ++d) queries[r / LANES] = to, to[d * LANES + r % LANES] = query[r][d];
    }
    const long start = span * SPAN_TOKENS, end = std::min(positions[tile.count - 1] + 1L, start + SPAN_TOKENS);
    std::vector<const W*> panel(parts), next(parts);  // of values; of the keys to prefetch
    const W *keys[SPAN_TOKENS / BLOCK], *values[SPAN_TOKENS / BLOCK], *vectors[SECTION_TOKENS];
    for (long b = 0; b * BLOCK < end - start; ++b) {
        const long number = blocks[start / BLOCK + b], block = panels ? number : number * cache.kv_heads + head;
        values[b] = (const W*)cache.values + block * width * BLOCK;
        keys[b] = cache.keys ? (const W*)cache.keys + block * size * BLOCK : values[b];
    }
    long begin = std::max(first_visible(op, positions[0]) & -SECTION_TOKENS, start);
    for (; begin < end; begin += SECTION_TOKENS) {
        const auto inside = [&](long position) { return std::clamp(position - begin, 0L, SECTION_TOKENS); };
        const auto low = [&](long t) { return inside(first_visible(op, positions[t])); };
        const auto high = [&](long t) { return inside(positions[t] + 1); };
        const long count = (high(tile.count - 1) + BLOCK - 1) / BLOCK, at = (begin - start) / BLOCK;
        // Scores prefetch the values of their section, weighted values the keys of the next.
        if (!panels)
            multiply<4>(query.data(), rows, keys + at, values + at, count, LANES, size, scores, SECTION_TOKENS, true);
        for (long i = 0; i < count * BLOCK && panels; ++i) vectors[i] = values[at + i / BLOCK] + i % BLOCK * width;
        multiply<4>(vectors, count * BLOCK, queries.data(), queries.data(), panels, LANES, size,
                 packed.data() + columns * size, columns, true);
        for (long r = 0; r < rows; ++r) {
            float* to = scores + r * SECTION_TOKENS;
            for (long i = 0; i < count * BLOCK && panels; ++i) to[i] = packed[columns * (size + i) + r];
            update_softmax(op, to, count, low(r / group), high(r / group), sums + r * floats);
        }
        for (long b = low(0) / BLOCK; b < count; ++b) {  // the weights of tokens that a query does not see are 0
            for (long r = 0; r < rows; ++r) weight[r] = scores + r * SECTION_TOKENS + b * BLOCK;
            const long later = std::min(at + count + b, (end - start - 1) / BLOCK);
            for (long p = 0; p < parts; ++p) panel[p] = values[at + b] + p * LANES, next[p] = keys[later] + p * LANES;
            multiply<4>(weight.data(), rows, panel.data(), next.data(), parts, width,
                     std::min(high(tile.count - 1) - b * BLOCK, BLOCK), sums + 2 * LANES, floats);
        }
    }
}

// Merges the results of `spans` spans for the rows of a tile, each `stride` floats after the one before, and writes the
// attention outputs.
static void finish_tile(const Op& op, const QueryTile& tile, long head, long spans, float* sums, long stride) {
    const long size = op.cache.head_dim, floats = partial_floats(size), group = op.heads / op.cache.kv_heads;
    for (long r = 0; r < tile.count * group; ++r, sums += floats) {
        for (long span = 1; span < spans; ++span) merge(sums, sums + span * stride, floats);
        const long query_head = head * group + r % group;
        float* to = op.out + (tile.first + r / group) * op.out_stride + query_head * size;
        Vec norm = broadcast(sum(load(sums + LANES)));
        if (op.bias) norm = norm + exponential(broadcast(op.bias[query_head] - sums[0]));  // the sink
        for (long d = 0; d < size; d += LANES) store(to + d, load(sums + 2 * LANES + d) / norm, size - d);
    }
}
