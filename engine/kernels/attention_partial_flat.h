// AttentionPartialArgs as plain data, for the files that are built once for each instruction set:
// see simd_vec.h for why they call no function of a shared header.
#pragma once

#include "engine/kernels/attention_partial.h"

namespace writescope::kernels {

struct FlatAttentionArgs {
  int k_dim;
  int v_dim;
  bool value_in_key;
  bool is_f32;
  const KvHeadBlock* blocks;
  int64_t num_blocks;
  int num_heads;
  // Whether lines are fetched into the first cache rather than the second: see lines_ahead.h.
  bool fetch_first;
  const KvHeadBlock* next;
  int64_t num_next;
  int num_rows;
  const float* const* q;
  const int64_t* visible;
  float* const* o;
  float* const* m;
  float* const* l;
  KeptState kept;
};

void AttentionPartialGeneric(const FlatAttentionArgs& args);
void AttentionPartialAvx2(const FlatAttentionArgs& args);
void AttentionPartialAvx512(const FlatAttentionArgs& args);
void AttentionPartialAvx512Bf16(const FlatAttentionArgs& args);
void AttentionPartialAmx(const FlatAttentionArgs& args);

void MixRowGeneric(int64_t count, float keep, float* out, float add, const float* o);
void MixRowAvx2(int64_t count, float keep, float* out, float add, const float* o);
void MixRowAvx512(int64_t count, float keep, float* out, float add, const float* o);

}  // namespace writescope::kernels
