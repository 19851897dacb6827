// The accelerator's compute as the model sees it: one interface, one implementation for each
// device. Each call submits work to the device's compute queue and returns; arrays in host memory
// (spans of ids, positions, targets) are copied before it returns. Pointers named "device" are
// memory of the device, row-major.
//
// Activations (void*) are in the implementation's own type, activation_bytes() each: float32 on the
// CPU.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/base/tile_layout.h"
#include "engine/base/units.h"
#include "engine/device/device.h"
#include "engine/kernels/elementwise.h"

namespace writescope::ops {

// What a matrix is stored as. kInt4 comes from LoadMatrix or RandomMatrix only; see
// kernels/quantize_int4.h.
enum class WeightType { kF32, kBf16, kInt4 };

// How a matrix is kept: as its source, or quantised to 4 bits, symmetric, one scale for 128
// neighbouring values of a row. Only experts (MoeArgs::experts) may be kInt4.
enum class WeightFormat { kSource, kInt4 };

// y = x * W^T with W [rows, cols].
struct Matrix {
  const std::byte* data = nullptr;  // Device; in the implementation's format.
  WeightType type = WeightType::kBf16;
  int64_t rows = 0;
  int64_t cols = 0;
};

// Weights of one gated MLP: down(silu(gate x) * up x).
struct MlpWeights {
  Matrix gate, up, down;
};

struct Rope {
  const float* inv_freq = nullptr;  // Device [dim / 2]
  int dim = 0;                      // Rotated dims: the first half pairs with the second.
  float cos_sin_scale = 1;          // YaRN's attention factor.
};

// Where a token's key and value go in this layer.
struct KvTarget {
  std::byte* block = nullptr;      // Device; base of the block.
  int slot = 0;                    // In [0, 64).
  int64_t layer_stride_bytes = 0;  // Of StepInputs: from the block in one layer to the next
};

// Steps that may be staged at once (Ops::StageStep): one may run inside another.
inline constexpr int kStagedSteps = 2;

struct GqaPrepareArgs {
  int num_tokens = 0;
  int num_heads = 0;
  int head_dim = 0;
  KvGeometry kv;
  const void* q = nullptr;        // Activations [num_tokens, num_heads, head_dim]
  const void* k = nullptr;        // [num_tokens, num_kv_heads, head_dim]
  const void* v = nullptr;        // [num_tokens, num_kv_heads, head_dim]
  int64_t token_stride = 0;       // Values from a token to the next in q, k and v; 0: no gaps
  const float* q_norm = nullptr;  // Device [head_dim], or null: RMS norm of each head before rope.
  const float* k_norm = nullptr;
  float norm_eps = 0;
  Rope rope;
  float scale_log2 = 0;  // log2(e) * softmax scale; multiplies q.
  // From 0 on: positions and targets are those of the staged step `staged_step`, for this layer and
  // the step's rows from `staged_first_row` on.
  int staged_layer = -1;
  int staged_step = 0;
  int staged_first_row = 0;
  std::span<const int64_t> positions;
  std::span<const KvTarget> targets;
  float* q_out = nullptr;  // Device [num_tokens, num_heads, k_dim]; padding is zero.
};

struct MlaPrepareArgs {
  int num_tokens = 0;
  int num_heads = 0;
  int nope_dim = 0;
  int rope_dim = 0;
  int latent_dim = 0;              // kv_lora_rank
  KvGeometry kv;                   // k_dim = pad(latent + rope), v_dim = pad(latent), value_in_key
  const void* q = nullptr;         // Activations [num_tokens, num_heads, nope + rope]
  const void* kv_a = nullptr;      // [num_tokens, latent + rope]
  int64_t token_stride = 0;        // Values from a token to the next in q and kv_a; 0: no gaps
  const float* kv_norm = nullptr;  // Device [latent]
  float norm_eps = 0;
  Rope rope;
  float scale_log2 = 0;
  std::span<const Matrix>
      key_up;             // [num_heads] of [latent, nope]: the absorbed key projection, transposed
  int staged_layer = -1;  // As in GqaPrepareArgs
  int staged_step = 0;
  int staged_first_row = 0;
  std::span<const int64_t> positions;
  std::span<const KvTarget> targets;
  // False: for LatentHeads.
  bool absorb = true;
  // Device [num_tokens, num_heads, k_dim]: latent part, rope part, zeros. Without `absorb`
  // [num_tokens, num_heads, nope + rope].
  float* q_out = nullptr;
};

// Consecutive blocks at consecutive addresses.
struct AttendSpan {
  const std::byte* base = nullptr;  // Device or mapped; of the first block in this layer.
  int num_blocks = 0;
  int64_t num_tokens = 0;  // Valid; every block but the last is full.
  int64_t first_position = 0;
  int first_reader = 0;  // Range in AttendArgs::readers.
  int num_readers = 0;
  int64_t layer_stride_bytes = 0;  // Of StepInputs: from the blocks in one layer to the next
};

// The query rows of one sequence: row first_row + i is at position first_position + i and sees
// positions up to its own.
struct ReaderRows {
  int first_row = 0;
  int num_rows = 0;
  int64_t first_position = 0;
};

// How latents become keys and values of heads. To attend to those takes a third of the products
// that latents take themselves, but each latent has to be multiplied first: for many rows.
struct LatentHeads {
  std::span<const Matrix> key_up;    // [num_heads] of [latent, nope]
  std::span<const Matrix> value_up;  // [num_heads] of [v_head_dim, latent]
  int rope_dim = 0;

  int key_dim() const { return static_cast<int>(key_up[0].cols) + rope_dim; }
  int value_dim() const { return static_cast<int>(value_up[0].rows); }
};

// Running attention states of rows on the device; see kernels/attention_partial.h.
struct AttendState {
  float* o = nullptr;  // Device [rows, num_heads, v_dim]
  float* m = nullptr;  // Device [rows, num_heads]
  float* l = nullptr;
  // With it (LatentHeadsMinRows) q is of heads' own keys, and o and what is merged of their own
  // values: k_dim and v_dim are key_dim() and value_dim(). Without partials of the CPU.
  const LatentHeads* heads = nullptr;
};

struct AttendArgs {
  KvGeometry kv;
  int num_heads = 0;
  const float* q = nullptr;  // Device [rows, num_heads, k_dim]
  std::span<const AttendSpan> spans;
  std::span<const int> readers;  // Indices into rows
  std::span<const ReaderRows> rows;
  AttendState state;
};

// All that differs between two decode steps of as many rows, but for KV that is not on the device.
// Blocks are named as they are in layer 0; the strides lead to the other layers.
struct StepInputs {
  int step = 0;  // Which of the kStagedSteps it becomes
  KvGeometry kv;
  int num_heads = 0;
  std::span<const TokenId> tokens;  // By row
  std::span<const int64_t> positions;
  std::span<const KvTarget> targets;
  // With the tokens of the step; every row sees some. None: AttendStaged is not called.
  std::span<const AttendSpan> spans;
  std::span<const int> readers;
  std::span<const ReaderRows> rows;
};

// Attention of all rows of the staged step in one layer.
struct StagedAttendArgs {
  int step = 0;
  int layer = 0;
  const float* q = nullptr;  // Device [rows, num_heads, k_dim]
  AttendState state;         // Scratch
  int out_dim = 0;           // Of v_dim, what is kept.
  void* out = nullptr;       // Activations [rows, num_heads, out_dim]
};

// Calls that were kept to be submitted again.
class Recording {
 public:
  virtual ~Recording() = default;
};

// Engine thread.
class Recorder {
 public:
  virtual ~Recorder() = default;
  // Calls until EndRecording are kept and not run. They may not take arrays from the host.
  // UNIMPLEMENTED where nothing can be kept. A failure of either leaves the queue as it was.
  virtual absl::Status BeginRecording() = 0;
  virtual absl::StatusOr<std::unique_ptr<Recording>> EndRecording() = 0;
  // Submits what was recorded. Memory that the recorded calls name must still be there.
  virtual void Replay(const Recording& recording) = 0;
};

struct MergeArgs {
  KvGeometry kv;
  int num_rows = 0;
  int num_heads = 0;
  int out_dim = 0;  // Of v_dim, what is kept.
  AttendState state;
  // The CPU's partials in page-locked host memory; null without any. Left empty (lse = -inf). Not
  // touched once the compute queue has failed: a wait for the CPU ran out, and it may be writing.
  const float* cpu_out = nullptr;  // [num_rows, num_heads, v_dim]
  float* cpu_lse = nullptr;        // [num_rows, num_heads]
  // The call before this one on the compute queue was WaitFlag for these partials: the device may
  // begin as soon as it sees the flag.
  bool behind_wait = false;
  void* out = nullptr;  // Activations [num_rows, num_heads, out_dim]
};

// For tests: writes down, or dictates, which experts a token goes to. Host memory [tokens, k].
struct ExpertChoice {
  int32_t* record = nullptr;
  const int32_t* replay = nullptr;
};

struct MoeArgs {
  int num_tokens = 0;
  int hidden = 0;
  const void* x = nullptr;  // Activations [num_tokens, hidden], normed; unused with first_norm
  void* out = nullptr;      // Activations [num_tokens, hidden]; added to
  Matrix router;            // [num_experts, hidden]
  std::span<const MlpWeights> experts;
  const MlpWeights* shared = nullptr;  // Sees every token; null without.
  int experts_per_token = 0;
  bool renormalize = false;  // The chosen weights are divided by their sum.
  float routed_scale = 1;
  int num_groups = 1;  // Above 1: only experts of the topk_groups best groups (by best expert).
  int topk_groups = 1;
  ExpertChoice choice;
  // Norms of `out` to `normed`, weighed by these (device [hidden]; null: none). `first_norm` before
  // all else: it makes what takes the place of x. `norm` at the end. `normed` may be x.
  const float* first_norm = nullptr;
  const float* norm = nullptr;
  float norm_eps = 0;
  void* normed = nullptr;  // Activations [num_tokens, hidden]
};

// The largest sizes a step may have; what Create reserves workspace for.
struct OpsLimits {
  int max_tokens = 0;
  int hidden = 0;
  int max_mlp_width = 0;
  int max_expert_width = 0;  // Of routed experts; 0 for max_mlp_width
  int num_experts = 0;
  int experts_per_token = 0;
  int num_expert_groups = 1;
  int num_heads = 0;
  int max_head_dim = 0;  // Of q, k or v before padding
};

// What an implementation takes, known before there is one: for planning.
struct OpsFootprint {
  int activation_bytes = 4;
  // Bytes of device memory of a matrix, a multiple of 64. `source` is kF32 or kBf16.
  int64_t (*matrix_bytes)(WeightType source, WeightFormat format, int64_t rows,
                          int64_t cols) = nullptr;
  // Bytes of device memory of the workspace.
  int64_t (*workspace_bytes)(const OpsLimits& limits) = nullptr;
  // Bytes of device memory that a recording takes for each layer of a model, at most; 0 where
  // nothing is recorded. kSmallRecordings times as much where each layer is one of its own.
  int64_t recording_layer_bytes = 0;
  static constexpr int kSmallRecordings = 3;
};

// Queries for the CPU's kernels. Once the compute queue has failed nothing is copied: the CPU may
// still be reading the queries of the layer before.
struct PublishArgs {
  int64_t num_values = 0;    // Rows follow each other: [num_rows, num_heads, k_dim]
  const float* q = nullptr;  // Device
  // Page-locked host memory; as activations are, which on a device that computes in bf16 halves
  // what crosses the link. Aligned to 16 bytes, like q.
  void* to = nullptr;
  // Set to `value` when they are there.
  std::atomic<uint64_t>* ready = nullptr;
  uint64_t value = 0;
  // The end of all work before, and when they were there; as Queue::RecordTime's.
  double* began_s = nullptr;
  double* ended_s = nullptr;
};

// Engine thread.
class Ops : public Recorder {
 public:
  virtual device::Device& device() = 0;
  virtual OpsFootprint footprint() const = 0;
  int activation_bytes() const { return footprint().activation_bytes; }

  // Brings a row-major host matrix to `to` (footprint().matrix_bytes long). Waits until it is
  // there. UNIMPLEMENTED for a format that this device does not multiply by.
  virtual absl::StatusOr<Matrix> LoadMatrix(std::byte* to, WeightType source, WeightFormat format,
                                            int64_t rows, int64_t cols, const std::byte* from) = 0;
  // The same with seeded random values of about N(0, sigma^2), made where they are needed: the
  // result is that of LoadMatrix of kernels::RandomWeight (kernels/random_weight.h) at each index.
  virtual absl::StatusOr<Matrix> RandomMatrix(std::byte* to, WeightType source, WeightFormat format,
                                              int64_t rows, int64_t cols, float sigma,
                                              uint64_t seed) = 0;
  // Matrices that lie behind each other as one with all their rows, where that is how they lie.
  virtual std::optional<Matrix> Join(std::span<const Matrix> parts) = 0;
  // Brings a vector of float32 to `to`, vector_bytes(count) long; it stays float32. Waits.
  virtual absl::StatusOr<const float*> LoadVector(std::byte* to, int64_t count,
                                                  const float* from) = 0;
  static constexpr int64_t vector_bytes(int64_t count) { return RoundUp(count * 4, 64); }
  // Touches all that steps will use, so that no step loads code or sets up a library. Once, after
  // the matrices are there; waits.
  virtual absl::Status WarmUp(const KvGeometry& kv, int num_heads) = 0;

  // out[i] = table[ids[i]]
  virtual void Embed(std::span<const TokenId> ids, const Matrix& table, void* out) = 0;
  // out = x / rms(x) * weight, by rows of `dim`.
  virtual void RmsNorm(int num_rows, int dim, const void* x, const float* weight, float eps,
                       void* out) = 0;
  // out (+)= x * W^T. x [num_rows, w.cols], out [num_rows, w.rows].
  virtual void Linear(int num_rows, const void* x, const Matrix& w, void* out,
                      bool accumulate = false) = 0;
  virtual void GqaPrepare(const GqaPrepareArgs& args) = 0;
  virtual void MlaPrepare(const MlaPrepareArgs& args) = 0;
  // out[t, h] = value_up[h] * latent[t, h]; latent [num_tokens, num_heads, cols].
  virtual void MlaOutput(int num_tokens, std::span<const Matrix> value_up, const void* latent,
                         void* out) = 0;
  // Makes the states of rows [0, num_rows) empty.
  virtual void ResetAttention(int num_rows, int num_heads, int v_dim, const AttendState& state) = 0;
  // Goes on from the states with the blocks of `spans`.
  virtual void Attend(const AttendArgs& args) = 0;
  // From how many rows of each reader on it is better to attend with AttendState::heads, whose keys
  // and values the device rounds as it does activations. More than there can be: it cannot.
  virtual int LatentHeadsMinRows(const KvGeometry& kv, const LatentHeads& heads) const = 0;
  // Finishes the states, merged with the CPU's partials.
  virtual void MergeAttention(const MergeArgs& args) = 0;
  // Brings a step's inputs to where EmbedStaged, AttendStaged and calls with a staged_layer find
  // them, until the next StageStep of its `step`. True where these calls, for this step and for any
  // other of as many rows that gets true, are the same: what was recorded of one can be replayed
  // for the other.
  virtual bool StageStep(const StepInputs& inputs) = 0;
  virtual void EmbedStaged(int step, const Matrix& table, void* out) = 0;
  virtual void AttendStaged(const StagedAttendArgs& args) = 0;
  // out += down(silu(gate x) * up x)
  virtual void Mlp(int num_rows, const void* x, const MlpWeights& w, void* out) = 0;
  virtual void Moe(const MoeArgs& args) = 0;
  // out[i] = x[rows[i]], rows of `dim` activations.
  virtual void GatherRows(std::span<const int> rows, int dim, const void* x, void* out) = 0;
  // to[i] = the largest of row i of `dim` activations; `to` is page-locked host memory.
  virtual void MaxOfRows(int num_rows, int dim, const void* x, kernels::RowMax* to) = 0;
  // to[i] = float(from[i]); `to` is page-locked host memory.
  virtual void DownloadFloats(const void* from, int64_t count, float* to) = 0;
  virtual void PublishQueries(const PublishArgs& args) = 0;
};

}  // namespace writescope::ops
