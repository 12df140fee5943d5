// The data that Python passes (structures.py has the same fields).
#pragma once
#include <cstdint>

// `count` matrices [n, k]. Packed: panels of 16 columns (of n, zero-padded to 32). In float32 a panel is [k][16]; in
// bfloat16 [k padded to 32 / 2][16][2], as AMX and AVX512-BF16 read it. The lines (64 bytes) of two panels alternate,
// so that a tile reads one stream. Not packed: one matrix row by row.
struct Matrix {
    void* data;
    int64_t n, k, count, stride;  // stride: bytes of one matrix
    int32_t bf16, packed;
};

// Keys [block][kv_heads][head_dim][16 tokens], values [block][kv_heads][16 tokens][head_dim padded to 16], in the
// blocks of block table number `table` of the step. Latent attention: no keys, the values [block][16 tokens][head_dim
// padded] are those too, and `kv_heads` of the attention is into how many groups its query heads are cut.
struct Cache {
    void *keys, *values;
    int64_t kv_heads, head_dim, bf16, table;
};

// `top_k` experts of each token (an assignment is a token times top_k plus its place), and the assignments of the
// `held` experts from `first` on, sorted by expert: `order`, of which expert e's end at `ends[e]`. Those of a token are
// in the `kept` best of `groups` groups.
struct Routing {
    float* weights;
    int32_t *experts, *order, *ends;
    int64_t top_k, count, first, held, groups, kept;
    float scale;
    int32_t normalise;
};

enum Kind : int32_t { EMBED, NORM, ROUND, LINEAR, ROPE_STORE, ATTENTION, ROUTE, SORT, COMBINE, SCALE };
enum Router : int32_t { SOFTMAX, SIGMOID, LOGITS };  // LOGITS: the choice is by logits, the weights are their sigmoids
enum Activation : int32_t { NONE, SILU, GELU, GELU_TANH, RELU, RELU2 };

struct Op {
    int32_t kind, mode, outputs, accumulate, activation, gated;
    float* out;
    const float* in;
    int64_t out_stride, in_stride, out_step, in_step, size, first, heads, window, rotated;  // step: to the next matrix
    const float *weight, *bias, *cosine, *sine, *query_norm, *key_norm;
    float epsilon, scale, softcap;
    Matrix matrix;
    Cache cache;
    Routing routing;
};

struct Step {
    const int32_t *tokens, *positions, *slots, *starts, *block_tables, *output_rows;
    int64_t token_count, sequences, table_width, outputs;
};
