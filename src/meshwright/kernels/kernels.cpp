// The operations of a forward step (operations.py says what each computes), and the thread pool that executes a list of
// them: its threads take items of one operation after another.
#include <atomic>
#include <thread>

#include <sys/syscall.h>
#include <unistd.h>

#include "attention.h"

// --- rows of one token -----------------------------------------------------------------------------------------------

static void embed(const Op& op, const Step& step, long t, float* out) {
    const Matrix& table = op.matrix;
    const long id = (op.mode ? step.positions : step.tokens)[t] - op.first;
    const bool found = id >= 0 && id < table.n;
    const long bf16 = table.bf16, line = table.packed ? 128 : 4;
    const char* row = table.packed ? panel_at(table, 0, id / LANES) + id % LANES * 4  // not read if it is not here
                                   : (const char*)table.data + id * table.k * (4 >> bf16);
    for (long h = 0; h < table.k; ++h) {
        const char* at = row + (h >> bf16) * line + (h & bf16) * 2;
        const float x = !found ? 0 : bf16 ? to_float(*(const bfloat16*)at) : *(const float*)at;
        out[h] = op.accumulate ? out[h] + x : x;
    }
}

// (x - mean) / deviation * weight + bias; RMSNorm (`layer` false) has mean 0.
static void normalise(const Op& op, const float* x, float* out, const float* weight, long size, bool layer) {
    Vec total = broadcast(0.0f);
    for (long i = 0; layer && i < size; i += LANES) total = total + load(x + i, size - i);
    const float mean = sum(total) / size;
    Vec squares = broadcast(0.0f);
    for (long i = 0; i < size; i += LANES) {
        const Vec centred = load(x + i, size - i, mean) - broadcast(mean);
        squares = fma(centred, centred, squares);
    }
    const Vec scale = broadcast(1.0f / std::sqrt(sum(squares) / size + op.epsilon));
    for (long i = 0; i < size; i += LANES) {
        const Vec y = (load(x + i, size - i) - broadcast(mean)) * scale * load(weight + i, size - i);
        store(out + i, op.bias ? y + load(op.bias + i, size - i) : y, size - i);
    }
}

template <class W> static void rope_store(const Op& op, const Step& step, long t) {
    const Cache& cache = op.cache;
    const long size = cache.head_dim, width = (size + LANES - 1) / LANES * LANES, half = op.rotated / 2;
    float* row = op.out + t * op.out_stride;
    for (long h = 0; h < op.heads + cache.kv_heads; ++h) {
        const bool query = h < op.heads;
        float* x = row + h * size + op.first;
        const float* in = query && op.in ? op.in + t * op.in_stride + h * op.in_step : x;
        if (const float* norm = query ? op.query_norm : op.key_norm) normalise(op, x, x, norm, size, false);
        const float *cosine = op.cosine + step.positions[t] * half, *sine = op.sine + step.positions[t] * half;
        for (long i = 0; i < half && (query || !op.mode); ++i) {  // `mode`: the queries alone
            const float a = in[i], b = in[i + half];
            x[i] = a * cosine[i] - b * sine[i], x[i + half] = b * cosine[i] + a * sine[i];
        }
    }
    const long slot = step.slots[cache.table * step.token_count + t], block = slot / BLOCK, place = slot % BLOCK;
    const float *k = row + op.heads * size, *v = cache.keys ? k + cache.kv_heads * size : k;
    for (long h = 0; h < cache.kv_heads; ++h) {
        W* keys = (W*)cache.keys + (block * cache.kv_heads + h) * size * BLOCK + place;
        W* values = (W*)cache.values + ((block * cache.kv_heads + h) * BLOCK + place) * width;
        for (long d = 0; d < size && cache.keys; ++d) keys[d * BLOCK] = convert<W>(k[h * size + d]);
        for (long d = 0; d < size; ++d) values[d] = convert<W>(v[h * size + d]);
    }
}

// scale * x, capped if `softcap` is not 0; a gate's `weight` has the factor of each token before a sigmoid.
static void scale_row(const Op& op, long t, const float* in, float* out) {
    const Vec factor = op.weight ? sigmoid(broadcast(op.weight[t])) : broadcast(op.scale);
    for (long i = 0; i < op.size; i += LANES) {
        store_or_add(out + i, softcap(load(in + i, op.size - i) * factor, op.softcap), op.size - i, op.accumulate);
    }
}

// --- mixture of experts ----------------------------------------------------------------------------------------------

// Turns one token's router logits into scores (`mode`: `Router`) and chooses its experts.
static void route(const Op& op, long t, float* scores) {
    const Routing& r = op.routing;
    const long size = r.count / r.groups;
    // `best`: the best rating of each group, with sigmoids the sum of its two best.
    float *rating = take_scratch(r.count + r.groups + 1), *best = rating + r.count;
    const float most = *std::max_element(scores, scores + r.count);
    Vec total = broadcast(0.0f);
    for (long e = 0; e < r.count && op.mode != LOGITS; e += LANES) {
        const Vec x = load(scores + e, r.count - e, -INFINITY);
        const Vec y = op.mode ? sigmoid(x) : exponential(x - broadcast(most));
        total = total + y;
        store(scores + e, y, r.count - e);
    }
    const float scale = op.mode ? 1.0f : sum(total);
    for (long e = 0; e < r.count; ++e) scores[e] /= scale, rating[e] = scores[e] + (op.bias ? op.bias[e] : 0.0f);
    for (long g = 0; g < r.groups && r.kept < r.groups; ++g) {
        const float* group = rating + g * size;
        std::partial_sort_copy(group, group + size, best + g, best + g + 1 + (op.mode == SIGMOID), std::greater<>());
        if (op.mode == SIGMOID) best[g] += best[g + 1];
    }
    for (long kept = r.groups, worst = 0; kept > r.kept; --kept, worst = 0) {
        for (long g = 1; g < r.groups; ++g) worst = best[g] <= best[worst] ? g : worst;
        std::fill_n(rating + worst * size, size, -INFINITY), best[worst] = INFINITY;
    }
    float *weights = r.weights + t * r.top_k, chosen_sum = 0;
    for (long k = 0; k < r.top_k; ++k) {
        const long chosen = std::max_element(rating, rating + r.count) - rating;
        r.experts[t * r.top_k + k] = int32_t(chosen);
        rating[chosen] = -INFINITY;
        chosen_sum += weights[k] = op.mode == LOGITS ? largest(sigmoid(broadcast(scores[chosen]))) : scores[chosen];
    }
    for (long k = 0; k < r.top_k; ++k) weights[k] = weights[k] / (r.normalise ? chosen_sum + 1e-20f : 1.0f) * r.scale;
}

static void combine(const Op& op, long t, float* out) {
    const Routing& r = op.routing;
    for (long i = 0; i < op.size; i += LANES) {
        Vec total = broadcast(0.0f);
        for (long a = t * r.top_k; a < (t + 1) * r.top_k; ++a)
            if (const long expert = r.experts[a] - r.first; expert >= 0 && expert < r.held)
                total = fma(broadcast(op.mode ? 1.0f : r.weights[a]),
                            load(op.in + a * op.in_stride + i, op.size - i), total);
        store_or_add(out + i, total, op.size - i, op.accumulate);
    }
}

// --- execution -------------------------------------------------------------------------------------------------------

struct Run {
    const Op* ops; long count; const Step* step;
    std::vector<float> partials;  // results of spans that several items compute
    std::vector<Pairs> rounded;  // the inputs of the current product: [inputs + 31][rounded_stride / 32][32]
    std::vector<QueryTile> tiles{};
    // Current operation; most spans and tokens of any tile; items of a tile and head; rows of a tile; floats of a
    // span's results.
    long current = -1, spans = 1, tile_tokens = 1, parts = 1, rows = 0, floats = 0;
    std::vector<long> done{}, ends{};  // parts of each tile and head; items up to the end of each matrix
};

static void multiply(const Op& op, Run& run, long item, long count) {
    for (long taken; count; item += taken, count -= taken) {
        const long index = std::upper_bound(run.ends.begin(), run.ends.end(), item) - run.ends.begin();
        const Items items(op, *run.step, index);
        const long own = index ? item - run.ends[index - 1] : item, left = items.group - own % items.group;
        taken = std::min({count, left, items.rows > FEW_ROWS ? MOST_PAIRS : MOST_PAIRS_OF_FEW_ROWS});
        multiply_items(op, items, own, taken, ROUNDS && op.matrix.bf16 ? run.rounded[0].value : nullptr);
    }
}

// Some spans of a tile and head. The item that is done last merges them in order and writes the outputs.
static void attend(const Op& op, Run& run, long item) {
    const long unit = item / run.parts, head = unit % op.cache.kv_heads, size = op.cache.head_dim;
    const QueryTile& tile = run.tiles[unit / op.cache.kv_heads];
    const long group = op.heads / op.cache.kv_heads, rows = tile.count * group, floats = partial_floats(size);
    const long first = first_visible(op, tile.position) / SPAN_TOKENS;
    const long spans = (tile.position + tile.count - 1) / SPAN_TOKENS - first + 1;
    const auto attend_one = op.cache.bf16 ? attend_span<bfloat16> : attend_span<float>;
    const bool alone = run.parts == 1;  // merges each result at once
    const long panels = op.cache.keys ? 0 : (run.rows + LANES - 1) / LANES * LANES * (SPAN_TOKENS + size);
    float* own = take_scratch(2 * run.floats + run.rows * SPAN_TOKENS + panels);
    float* sums = alone ? own : run.partials.data() + unit * run.spans * run.floats;
    for (long span = item % run.parts; span < spans; span += run.parts) {
        float* result = sums + (alone ? std::min(span, 1L) : span) * run.floats;
        attend_one(op, *run.step, tile, head, first + span, result, own + 2 * run.floats);
        if (alone && span) merge(sums, result, rows, floats);
    }
    if (std::atomic_ref(run.done[unit]).fetch_add(1) + 1 < run.parts) return;
    for (long span = 1; span < spans && !alone; ++span) merge(sums, sums + span * run.floats, rows, floats);
    for (long r = 0; r < rows; ++r, sums += floats) {
        const long query_head = head * group + r % group;
        float* to = op.out + (tile.first + r / group) * op.out_stride + query_head * size;
        Vec norm = broadcast(sum(load(sums + LANES)));
        if (op.bias) norm = norm + exponential(broadcast(op.bias[query_head] - sums[0]));  // the sink
        for (long d = 0; d < size; d += LANES) store(to + d, load(sums + 2 * LANES + d) / norm, size - d);
    }
}

// Allocates the memory that the current operation shares, and does what one thread does alone; returns the number of
// work items.
static long begin_items(const Op& op, Run& run) {
    const Routing& r = op.routing;
    const long rows = count_rows(op, *run.step), units = long(run.tiles.size()) * op.cache.kv_heads;
    switch (op.kind) {
        case ROUND: {
            const Items last(op, *run.step, op.matrix.count - 1);
            const long inputs = ROUNDS ? last.begin + last.rows : 0;
            if (ROUNDS) grow(run.rounded, (inputs + 31) * rounded_stride(op.matrix.k) / AMX_K);
            return inputs;
        }
        case LINEAR:
            run.ends.resize(op.matrix.count);
            for (long e = 0, end = 0; e < op.matrix.count; ++e) run.ends[e] = end += Items(op, *run.step, e).count();
            return run.ends.back();
        case ATTENTION:
            run.rows = run.tile_tokens * op.heads / op.cache.kv_heads;
            run.floats = run.rows * partial_floats(op.cache.head_dim);
            run.parts = units * run.spans * run.floats > MOST_PARTIALS ? 1 : run.spans;
            if (run.parts > 1) grow(run.partials, units * run.spans * run.floats);
            run.done.assign(units, 0);
            return units * run.parts;
        case SORT:
            for (long e = 0, count = 0; e < r.held; r.ends[e++] = int32_t(count))
                for (long a = 0; a < rows * r.top_k; ++a)
                    if (r.experts[a] == r.first + e) r.order[count++] = int32_t(a);
            return 0;
        default: return rows;
    }
}

static void execute(const Op& op, Run& run, long item, long count) {
    if (op.kind == LINEAR) return multiply(op, run, item, count);
    for (const long end = item + count; item < end; ++item) {
        float* out = op.out + item * op.out_stride;
        // A norm of outputs reads the rows of the tokens whose logits are wanted.
        const auto in = op.in + (op.kind == NORM && op.outputs ? run.step->output_rows[item] : item) * op.in_stride;
        switch (op.kind) {
            case EMBED: embed(op, *run.step, item, out); break;
            case NORM: normalise(op, in, out, op.weight, op.size, op.mode); break;
            case ROUND: round_row(input_of(op, item, count_rows(op, *run.step)), op.matrix.k,
                                  run.rounded[0].value + item * rounded_stride(op.matrix.k)); break;
            case ROPE_STORE: (op.cache.bf16 ? rope_store<bfloat16> : rope_store<float>)(op, *run.step, item); break;
            case ATTENTION: attend(op, run, item); break;
            case ROUTE: route(op, item, out); break;
            case COMBINE: combine(op, item, out); break;
            case SCALE: scale_row(op, item, in, out);
        }
    }
}

// Each thread has a range of the current operation's items and takes several at once, at most half of what is left of
// it, so that it reads weights in one stream and all threads end at about the same time; items of attention, of which
// one may take as long as a hundred others, it takes one by one. Then it takes from the others' ranges. Threads count
// their finished items when they find none left: who counts the last item begins the next operation. Until then the
// operation stays the current one, so that a thread always counts its items for the operation they belong to. A thread
// without a core delays the others only between taking items and counting them. A waiting thread prefetches the weights
// that it multiplies next, unless they are experts'. As many threads as CPUs are bound to one each: beside other
// processes the scheduler may leave two of them on one CPU for many milliseconds. The calling thread is bound
// while it runs operations, but only if it is on another CPU than its own: small operations take less time than the
// system calls.
struct Pool {
    explicit Pool(long threads) : ranges_(threads) {
        cpu_set_t all;
        if (threads > 1 && !sched_getaffinity(0, sizeof all, &all) && CPU_COUNT(&all) == threads)
            for (long cpu = 0; cpu < CPU_SETSIZE; ++cpu)
                if (CPU_ISSET(cpu, &all)) cpus_.emplace_back(), CPU_SET(cpu, &cpus_.back());
        for (long i = 1; i < threads; ++i)
            workers_.emplace_back([this, i] { bind(i); while (!stop_) wait_for_change(ranges_[i], take_items(i)); });
    }
    ~Pool() { stop_ = true, publish(0); }
    void bind(long i) const { if (!cpus_.empty()) sched_setaffinity(0, sizeof(cpu_set_t), &cpus_[i]); }
    void run(const Op* ops, long count, const Step* step) {
        cpu_set_t before{};
        const bool moves = !cpus_.empty() && !CPU_ISSET(sched_getcpu(), &cpus_[0]);
        if (moves) sched_getaffinity(0, sizeof before, &before), bind(0);
        run_ = {ops, count, step, std::move(run_.partials), std::move(run_.rounded)};
        for (long s = 0; s < step->sequences; ++s)
            for (long first = step->starts[s], end = step->starts[s + 1]; first < end; first += QUERY_TILE) {
                run_.tiles.push_back({s, first, std::min(QUERY_TILE, end - first), step->positions[first]});
                run_.tile_tokens = std::max(run_.tile_tokens, run_.tiles.back().count);
                run_.spans = std::max(run_.spans, step->positions[end - 1] / SPAN_TOKENS + 1);
            }
        begin_next();
        for (uint64_t seen; (seen = take_items(0)) & MASK;) wait_for_change(ranges_[0], seen);  // no items: all is done
        if (moves) sched_setaffinity(0, sizeof before, &before);
    }

    static constexpr uint64_t BITS = 24, MASK = (1 << BITS) - 1;
    // Limits of a wait: ticks of spinning, ticks between two prefetches (processors drop prefetches that are issued
    // faster than memory delivers), number of prefetched lines.
    static constexpr uint64_t MOST_TICKS = 100'000, LINE_TICKS = 4, MOST_LINES = 4096;
    static constexpr long MOST_ITEMS = 8, FEW_ITEMS = 4;  // taken at once; done by the thread that begins an operation
    struct alignas(64) Range {
        std::atomic<uint64_t> ticket{0};  // number of the operation, end of the range, items left
        std::atomic<const char*> ahead{nullptr};  // what the thread prefetches in a wait: weights of the next product
    };

    // Executes items until none is left; returns number and end of the thread's range then.
    uint64_t take_items(size_t thread) {
        for (;;) {
            const uint64_t seen = ranges_[thread].ticket.load(std::memory_order_acquire) >> BITS;
            uint64_t ticket, mine = 0;  // items that are done, but not counted yet
            for (size_t i = 0; i < ranges_.size(); ++i) {
                auto& next = ranges_[(thread + i) % ranges_.size()].ticket;
                while (const uint64_t left = (ticket = next.load(std::memory_order_relaxed)) & MASK) {
                    const uint64_t count = std::min(most_.load(std::memory_order_relaxed), (left + 1) / 2);
                    if (next.compare_exchange_weak(ticket, ticket - count, std::memory_order_acq_rel))
                        execute(run_.ops[run_.current], run_, (ticket >> BITS & MASK) - left, count), mine += count;
                }
            }
            if (!mine || left_.fetch_sub(mine, std::memory_order_acq_rel) != mine) return seen;
            begin_next();
        }
    }
    void begin_next() {
        long items = 0;
        while (!items && ++run_.current < run_.count) {
            const Op& op = run_.ops[run_.current];
            items = begin_items(op, run_);
            most_.store(op.kind == ATTENTION ? 1 : MOST_ITEMS, std::memory_order_relaxed);
            // A few rows are done before others could help.
            if (items <= FEW_ITEMS && op.kind != LINEAR && op.kind != ATTENTION) execute(op, run_, 0, items), items = 0;
        }
        long next = run_.current + 1;
        while (next < run_.count && (run_.ops[next].kind != LINEAR || run_.ops[next].routing.order)) ++next;
        for (size_t i = 0; i < ranges_.size() && next < run_.count; ++i) {
            const Matrix& matrix = run_.ops[next].matrix;  // the pairs of panels of all matrices follow one another
            const long pairs = matrix.count * ((matrix.n + 2 * LANES - 1) / (2 * LANES));
            ranges_[i].ahead.store(panel_at(matrix, 0, 2 * begin_of(i, pairs)), std::memory_order_relaxed);
        }
        publish(items);
    }
    // The first range, in which there is an item if there is any, comes last: it says that all are there.
    void publish(uint64_t items) {
        left_ = items, ++number_;
        for (size_t i = ranges_.size(); i--;)
            ranges_[i].ticket.store(number_ << 2 * BITS | begin_of(i + 1, items) << BITS |
                                    (begin_of(i + 1, items) - begin_of(i, items)), std::memory_order_release);
        ranges_[0].ticket.notify_all();
    }
    uint64_t begin_of(uint64_t i, uint64_t items) const { return (items * i + ranges_.size() - 1) / ranges_.size(); }
    // Prefetches and spins for about 40 microseconds, then sleeps.
    void wait_for_change(Range& range, uint64_t seen) {
        const uint64_t start = __rdtsc();
        const auto waits = [&] { return !stop_ && range.ticket.load(std::memory_order_acquire) >> BITS == seen; };
        const char* ahead = range.ahead.load(std::memory_order_relaxed);
        for (uint64_t lines = 0, ticks; waits();)
            if ((ticks = __rdtsc() - start) < MOST_TICKS)
                for (; lines < std::min(ticks / LINE_TICKS, MOST_LINES); ++lines)
                    _mm_prefetch(ahead + 64 * lines, _MM_HINT_T1);
            else if (const uint64_t now = ranges_[0].ticket; waits()) ranges_[0].ticket.wait(now);
    }

    Run run_{};
    std::atomic<uint64_t> most_{MOST_ITEMS};  // items that a thread takes at once
    // On a cache line alone, as waiting threads read `stop_` all the time and each operation writes the others.
    uint64_t number_ = 0; alignas(64) std::atomic<bool> stop_{false};
    alignas(64) std::atomic<uint64_t> left_{0};  // items of the current operation that are not counted yet
    alignas(64) std::vector<Range> ranges_;
    std::vector<cpu_set_t> cpus_;  // the CPU of each thread; empty: they are not bound
    std::vector<std::jthread> workers_;
};

#define EXPORT __attribute__((visibility("default")))
extern "C" {
// Asks the system for the AMX registers; false if it has none (arch_prctl ARCH_REQ_XCOMP_PERM, XTILEDATA).
EXPORT int kernels_prepare() { return !AMX || !syscall(SYS_arch_prctl, 0x1023, 18); }
EXPORT Pool* kernels_new_pool(long threads) { return new Pool(threads); }
EXPORT void kernels_delete_pool(Pool* pool) { delete pool; }
EXPORT void kernels_run(Pool* pool, const Op* ops, long count, const Step* step) { pool->run(ops, count, step); }
EXPORT long kernels_size_of(int which) { return which ? sizeof(Step) : sizeof(Op); }
}
