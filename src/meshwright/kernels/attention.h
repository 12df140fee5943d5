// Causal grouped-query attention over KV blocks. The context is divided into spans of fixed length, whose results are
// merged in the order of positions by their highest scores (Milakov & Gimelshein 2018, arXiv:1805.02867): whichever
// threads compute the spans, the sums are the same.
#pragma once
#include "product.h"

constexpr long BLOCK = LANES, SPAN_BLOCKS = 16, SPAN_TOKENS = SPAN_BLOCKS * BLOCK;
constexpr long MOST_PARTIALS = 2 << 20;  // floats
constexpr long QUERY_TILE = 16;  // consecutive tokens of a sequence that share the reading of keys and values
constexpr long TOGETHER = 4;  // most panels of a tile

struct QueryTile { long sequence, first, count, position; };  // position: of the first token

// Floats of the result of some keys for one query: the highest score [LANES, the first used], the sum of the weights by
// lane [LANES], the weighted values [head size, padded].
static long partial_floats(long head_dim) { return 2 * LANES + (head_dim + LANES - 1) / LANES * LANES; }

// One row's scores of a span, capped if `softcap` is not 0, those of tokens outside [low, high) masked: turns them into
// weights, and writes the highest score and the sums of the weights.
static void softmax(const Op& op, float* scores, long blocks, long low, long high, float* sums) {
    for (long b = 0; b < blocks; ++b)
        store(scores + b * BLOCK, softcap(load(scores + b * BLOCK) * broadcast(op.scale), op.softcap));
    std::fill_n(scores, low, -INFINITY);
    std::fill(scores + high, scores + blocks * BLOCK, -INFINITY);
    Vec most = broadcast(-INFINITY), total = broadcast(0.0f);
    for (long b = 0; b < blocks; ++b) most = maximum(most, load(scores + b * BLOCK));
    sums[0] = largest(most);
    for (long b = 0; b < blocks; ++b) {
        const Vec p = exponential(load(scores + b * BLOCK) - broadcast(sums[0]));
        store(scores + b * BLOCK, p);
        total = total + p;
    }
    store(sums + LANES, total);
}

// Adds the results of later keys for some rows; none of the keys may have been visible.
static void merge(float* sums, const float* more, long rows, long floats) {
    for (long r = 0; r < rows; ++r, sums += floats, more += floats) {
        const float peak = std::max(sums[0], more[0]);  // the exponential of -inf - -inf is 0
        const Vec kept = exponential(broadcast(sums[0] - peak)), added = exponential(broadcast(more[0] - peak));
        for (long i = LANES; i < floats; i += LANES) store(sums + i, load(sums + i) * kept + load(more + i) * added);
        sums[0] = peak;
    }
}

// The first position that the token at `position` sees, in its window or (`mode`) its chunk of as many positions.
static long first_visible(const Op& op, long position) {
    return op.mode ? position / op.window * op.window : std::max(0L, position - op.window + 1);
}

// The query heads of key-value head `head` for the tokens of a tile, over one span: a result for each row at `sums`.
// scores: [rows][SPAN_TOKENS], then memory for the panels of latent attention, overwritten.
template <class W> static void attend_span(const Op& op, const Step& step, const QueryTile& tile, long head, long span,
                                          float* sums, float* scores) {
    const Cache& cache = op.cache;
    const long size = cache.head_dim, floats = partial_floats(size), width = floats - 2 * LANES;
    const long group = op.heads / cache.kv_heads, rows = tile.count * group;
    const long begin = std::max(first_visible(op, tile.position) & -BLOCK, span * SPAN_TOKENS);
    const auto inside = [&](long x) { return std::clamp(x, begin, (span + 1) * SPAN_TOKENS) - begin; };
    const long tokens = inside(tile.position + tile.count), count = (tokens + BLOCK - 1) / BLOCK;
    const int32_t* blocks = step.block_tables + (cache.table * step.sequences + tile.sequence) * step.table_width;
    // Latent attention multiplies the cached vectors, which are rows, by panels of 16 queries.
    const long panels = cache.keys ? 0 : (rows + LANES - 1) / LANES, columns = panels * LANES;
    float *packed = scores + rows * SPAN_TOKENS, *by_token = packed + columns * size;  // those, then their scores
    std::vector<const float*> row(rows), queries(panels);
    for (long r = 0; r < rows; ++r) {
        row[r] = op.in + (tile.first + r / group) * op.in_stride + (head * group + r % group) * size;
        float* to = packed + r / LANES * size * LANES;
        for (long d = 0; d < size && panels; ++d) queries[r / LANES] = to, to[d * LANES + r % LANES] = row[r][d];
    }
    // Keys, then values, which each tile prefetches for the tile after the next.
    const W *keys[2 * SPAN_BLOCKS + TOGETHER], **values = keys + count, *vectors[SPAN_TOKENS];
    for (long b = 0; b < count + TOGETHER; ++b) {
        const long number = blocks[begin / BLOCK + std::min(b, count - 1)];
        const long block = panels ? number : number * cache.kv_heads + head;
        values[b] = (const W*)cache.values + block * width * BLOCK;
        if (b < count) keys[b] = cache.keys ? (const W*)cache.keys + block * size * BLOCK : values[b];
    }
    for (long i = 0; i < count * BLOCK && panels; ++i) vectors[i] = values[i / BLOCK] + i % BLOCK * width;
    if (panels)
        multiply<TOGETHER>(vectors, count * BLOCK, queries.data(), queries.data(), panels, LANES, size,
                           by_token, columns, true);
    else multiply<TOGETHER>(row.data(), rows, keys, keys + TOGETHER, count, LANES, size, scores, SPAN_TOKENS, true);
    std::fill_n(sums, rows * floats, 0.0f);
    for (long r = 0; r < rows; ++r) {
        float* to = scores + r * SPAN_TOKENS;
        for (long i = 0; i < count * BLOCK && panels; ++i) to[i] = by_token[i * columns + r];
        const long position = tile.position + r / group;
        softmax(op, to, count, inside(first_visible(op, position)), inside(position + 1), sums + r * floats);
    }
    const long parts = ((cache.keys ? size : op.first) + LANES - 1) / LANES;
    std::vector<const W*> panel(2 * parts);
    for (long b = 0; b < count; ++b) {  // the weights of tokens that a query does not see are 0
        for (long r = 0; r < rows; ++r) row[r] = scores + r * SPAN_TOKENS + b * BLOCK;
        for (long p = 0; p < 2 * parts; ++p) panel[p] = values[b + p / parts * TOGETHER] + p % parts * LANES;
        multiply<TOGETHER>(row.data(), rows, panel.data(), panel.data() + parts, parts, width,
                           std::min(tokens - b * BLOCK, BLOCK), sums + 2 * LANES, floats);
    }
}
