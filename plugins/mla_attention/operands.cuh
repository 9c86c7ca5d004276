// What every kernel of mla_attention is given, but for what its own form adds.
#pragma once

#include "ptx.cuh"

#define ATTENTION_PARAMETERS                                                                                        \
    const u16 *q, const u16 *w_uk, const u16 *w_uv, const int *row_request, const int *first_row,                   \
        const int *request_rows, const int *context_len, const int *block_table, const u16 *kv_pool, const u32 *mask, \
        u16 *out, u8 *workspace, i64 layer
