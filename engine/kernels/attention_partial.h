// Attention of some query rows over some blocks of one KV head, in the tile format: the contract
// that every CPU variant keeps. The double twin (attention_partial_ref.cc) defines what is right.
//
// A row's running state is (o, m, l): the sum l of 2^(s - m) over its scores s so far, and
// o = sum of 2^(s - m) * v. m is the maximum of them, or up to 8 below it where a variant spares
// itself to move it. Scores are in the base-2 logarithm: q is scaled by log2(e) * softmax_scale
// before. Nothing seen: m = -inf, l = 0, o = 0. A call goes on from the state that it finds, so a
// slice may be cut anywhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string_view>

#include "engine/base/cpu_features.h"
#include "engine/base/tile_layout.h"

namespace writescope::kernels {

inline constexpr float kEmptyLse = -std::numeric_limits<float>::infinity();

// One KV head of one block.
struct KvHeadBlock {
  const std::byte* k = nullptr;  // K plane: 4 tiles
  const std::byte* v = nullptr;  // V plane; with value_in_key not read
  int num_tokens = 0;            // Valid slots from the first, in [0, 64]; the rest holds zeros.
  int64_t first_position = 0;    // Of slot 0; compared with `visible`.
};

// What a variant may keep from one call to the next one for the same rows, queries and shape:
// queries as it has rounded them, and sums in an order of its own, since AMX needs as long as for
// half a block of latents to bring these into the order of o and back. A variant that has no use
// for it does as ever.
struct KeptState {
  static constexpr int64_t kBytes = 96 * 1024;
  std::byte* memory = nullptr;  // kBytes for one thread, aligned to 64; null: nothing is kept
  bool is_left = false;         // By the call before: o is not read.
  // For the call after, what o holds then is not told. A call without blocks that leaves nothing
  // brings the sums to o.
  bool leave = false;
};

// The furthest that any variant fetches ahead of its work.
inline constexpr int kBlocksAhead = 2;

// T is float for the variants, double for the twin's state.
template <typename T>
struct AttentionPartialArgsT {
  int k_dim = 0;  // Padded; a multiple of 32.
  int v_dim = 0;  // Padded; a multiple of 32, at most k_dim with value_in_key.
  bool value_in_key = false;
  KvDtype dtype = KvDtype::kBf16;
  std::span<const KvHeadBlock> blocks;
  // KV heads that take turns: blocks[i] is of head i % num_heads, and the rows of head h are
  // [h * num_rows, (h + 1) * num_rows) of those below. Blocks are read in their order.
  int num_heads = 1;
  // What this thread attends to after the call, in order: its first blocks, kBlocksAhead of them
  // where there are as many. They are fetched towards the core meanwhile; their bytes change no
  // result.
  std::span<const KvHeadBlock> next;
  int num_rows = 0;                  // Of each head
  const float* const* q = nullptr;   // [rows] -> [k_dim], scaled, zero in the padding
  const int64_t* visible = nullptr;  // [rows]: a row sees positions below this; null is all.
  T* const* o = nullptr;             // [rows] -> [v_dim]
  T* const* m = nullptr;             // [rows] -> one value
  T* const* l = nullptr;             // [rows] -> one value
  KeptState kept;
};
using AttentionPartialArgs = AttentionPartialArgsT<float>;

// Scalar, two passes, in double.
void AttentionPartialRef(const AttentionPartialArgsT<double>& args);

// What a variant multiplies where KV is bf16; sums are always f32.
//   kF32   queries and weights as they are
//   kBf16  both rounded to bf16, as a device's tensor cores have them: weights stray by up to 2^-8
enum class AttentionProducts { kF32, kBf16 };

struct AttentionVariant {
  std::string_view name;
  CpuIsa isa;
  AttentionProducts products;
  // Single-threaded; allocates nothing.
  void (*run)(const AttentionPartialArgs&);
};
// Every variant compiled in, the plainest first. Those above DetectedCpuIsa() must not be run.
std::span<const AttentionVariant> AttentionVariants();
// For ActiveCpuIsa(): with kF32 the best that rounds nothing, with kBf16 the fastest of all, which
// is not avx512bf16 where vdpbf16ps is slow, unless that level is forced.
const AttentionVariant& ActiveAttentionVariant(
    AttentionProducts products = AttentionProducts::kF32);

// Turns a running state into a partial: out = o / l and lse = m + log2(l); empty gives 0 and -inf.
template <typename T>
void FinishPartial(int v_dim, const T* o, T m, T l, T* out, T* lse);

// Merges the partial (other_out, other_lse) into (out, lse). Commutes up to rounding; an empty side
// changes nothing.
template <typename T>
void MergePartial(int v_dim, T* out, T* lse, const T* other_out, T other_lse);

// What a merge does with a row: out = keep * out + add * o, of `count` values.
struct RowMixVariant {
  std::string_view name;
  CpuIsa isa;
  void (*run)(int64_t count, float keep, float* out, float add, const float* o);
};
std::span<const RowMixVariant> RowMixVariants();
const RowMixVariant& ActiveRowMixVariant();

// FinishPartial and MergePartial of a running state into (out, lse), in one pass. Workers that end
// a layer do it one after the other for the same rows, so in float it is as fast as vectors are.
template <typename T>
void MergeState(int v_dim, T* out, T* lse, const T* o, T m, T l);

// Adds the running state (other_o, other_m, other_l) of the same row, of other tokens, to (o, m,
// l).
template <typename T>
void AddState(int v_dim, T* o, T* m, T* l, const T* other_o, T other_m, T other_l);

}  // namespace writescope::kernels
