// What the three kernels of `sample` share: the operands of a row, its scores, and partial results.
//
// As plugins/sample/reference.py, operation by operation in float32, so that equal logits give equal tokens but where two
// scores are within the rounding of a logarithm or an exponential. Constants: TOKENS (rows T), VOCAB, WORDS of a mask row,
// SPLITS of a row in the first two kernels, ANCESTORS: whether rows have parents in this pass.
#pragma once

#include "order.cuh"

constexpr int PROMPT_TOKEN = 1 << 30;  // plugins/core/state.py
constexpr int SAMPLED_NAN = -1, SAMPLED_DEAD_END = -2;
constexpr int DEEPEST = 32;  // rows of a path: more than any draft block has

#define SAMPLE_PARAMETERS                                                                                            \
    const float *logits, const int *positions, const int *row_request, const float *temperature, const int *top_k,   \
        const float *top_p, const float *min_p, const i64 *seed, const int *penalized, const float *presence,        \
        const float *frequency, const float *repetition, const int *token_counts, const float *logit_bias,           \
        const int *row_masked, const u32 *vocab_mask, const int *tokens, const int *row_parent, int *out, u8 *workspace

struct Partial {
    u64 best;  // of the scores, or of scores with noise
    int seen;
};

enum Seen { BAD_LOGIT = 1, BAD_SCORE = 2, REAL_LOGIT = 4 };  // NaN or +inf; anything above -inf

// Workspace: partials of the scores [T, SPLITS], partials with noise [T, SPLITS], keys of candidates [T, VOCAB].
__device__ __forceinline__ Partial* largest_partials(u8* workspace, int t) { return (Partial*)workspace + t * SPLITS; }
__device__ __forceinline__ Partial* noisy_partials(u8* workspace, int t) {
    return (Partial*)workspace + (TOKENS + t) * SPLITS;
}
__device__ __forceinline__ u64* candidates(u8* workspace, int t) {
    return (u64*)((Partial*)workspace + 2 * TOKENS * SPLITS) + (i64)t * VOCAB;
}

// In shared memory, filled by one thread.
struct Row {
    const float *logits, *bias;
    const int* counts;
    const u32* mask;
    float presence, frequency, repetition;
    int request, path, path_tokens[DEEPEST];
    bool masked, changed;
};

__device__ __forceinline__ float score(const Row& row, int v, float logit) {
    float s = logit;
    if (row.masked && !(row.mask[v / 32] >> (v % 32) & 1)) s = -INFINITY;
    if (row.changed) {
        int count = row.counts[v];
        for (int i = 0; i < row.path; i++) count += row.path_tokens[i] == v;
        const int generated = count & (PROMPT_TOKEN - 1);
        s = __fadd_rn(s, row.bias[v]);
        if (count > 0) s = s > 0.f ? __fdiv_rn(s, row.repetition) : __fmul_rn(s, row.repetition);
        s = __fsub_rn(s, __fmul_rn(row.frequency, (float)generated));
        s = __fsub_rn(s, generated > 0 ? row.presence : 0.f);
    }
    return s;
}

#define FILL_ROW(row, t)                                                      \
    do {                                                                      \
        const int request_ = row_request[t], slot_ = max(request_, 0);        \
        row.request = request_;                                               \
        row.logits = logits + (i64)(t) * VOCAB;                               \
        row.masked = row_masked[t] != 0;                                      \
        row.mask = vocab_mask + (i64)(t) * WORDS;                             \
        row.changed = penalized[slot_] != 0;                                  \
        row.bias = logit_bias + (i64)slot_ * VOCAB;                           \
        row.counts = token_counts + (i64)slot_ * VOCAB;                       \
        row.presence = presence[slot_];                                       \
        row.frequency = frequency[slot_];                                     \
        row.repetition = repetition[slot_];                                   \
        row.path = 0;                                                         \
        if (ANCESTORS && row.changed && request_ >= 0)                        \
            for (int a_ = t; a_ >= 0 && row.path < DEEPEST; a_ = row_parent[a_]) \
                row.path_tokens[row.path++] = tokens[a_];                     \
    } while (0)

// Partials of the row's splits together: the token if none is drawn with noise, and the largest score.
struct Verdict {
    int token;
    float largest;
};

__device__ __forceinline__ Verdict verdict(const Row& row, const Partial* partials) {
    u64 best = 0;
    int seen = 0;
    for (int s = 0; s < SPLITS; s++) {
        best = partials[s].best > best ? partials[s].best : best;
        seen |= partials[s].seen;
    }
    Verdict v;
    v.largest = key_value(best);
    v.token = (int)key_index(best);
    if (seen & (BAD_LOGIT | BAD_SCORE) || !(seen & REAL_LOGIT))
        v.token = SAMPLED_NAN;
    else if (v.largest == -INFINITY)
        v.token = SAMPLED_DEAD_END;
    if (row.request < 0) v.token = 0;
    return v;
}

__device__ __forceinline__ u64 mix(u64 x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

constexpr u64 GOLDEN = 0x9E3779B97F4A7C15ull;

__device__ __forceinline__ u64 noise_key(i64 seed, int position) {
    return mix((u64)seed + GOLDEN * ((u64)position + 1));
}

__device__ __forceinline__ float gumbel(u64 key, u32 token) {
    const u32 bits = (u32)(mix(key + GOLDEN * ((u64)token + 1)) >> 41);
    const float u = ((float)bits + 0.5f) * 0x1p-23f;
    return -logf(-logf(u));
}
