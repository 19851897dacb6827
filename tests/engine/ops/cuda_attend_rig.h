// Scenes of attention on the GPU: sequences over spans of blocks, their answers in double, and a
// run of them through CudaAttend.
#pragma once

#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "engine/device/cuda/cuda_device.h"
#include "engine/ops/cuda/cuda_attend.h"
#include "engine/ops/ops.h"
#include "tests/support/attention_problems.h"

namespace writescope::ops {

struct SceneShape {
  KvGeometry kv;
  int group = 1;
  int num_sequences = 1;
  int max_tokens = 1;
  int max_rows = 1;  // Of a sequence: its last tokens, or fewer.
  double score_sigma = 1;
  bool one_block_spans = false;
  bool all_as_large = false;  // Every sequence has as many tokens and rows as it may.
};

struct SceneSpan {
  int64_t first_position = 0;
  int num_tokens = 0;
  std::vector<int> readers;
  bool mapped = false;  // In page-locked host memory
  // Dense [num_tokens, dim] of each KV head, representable in the dtype.
  std::vector<std::vector<float>> k, v;
};

struct Scene {
  KvGeometry kv;
  int num_heads = 0;
  int num_rows = 0;
  std::vector<SceneSpan> spans;
  std::vector<ReaderRows> rows;
  std::vector<float> q;  // [num_rows, num_heads, k_dim], representable in bf16

  std::string Name() const;
  int group() const { return num_heads / kv.num_kv_heads; }
};

// Sequences of up to max_tokens tokens in spans of random lengths, in random order; some begin with
// blocks that they share.
Scene RandomScene(const SceneShape& shape, std::mt19937_64& rng);

// [num_rows, num_heads, v_dim] each.
struct SceneAnswer {
  std::vector<double> out;         // Of the double twin, over tiles
  std::vector<double> abs_sum;     // Sum of p |v|
  std::vector<double> square_sum;  // Sum of p^2 v^2
};
SceneAnswer AnswerScene(const Scene& scene);

// What is wrong with `out`, or nothing. An error may be bound(i) at index i.
template <typename Bound>
std::string FaultInScene(const Scene& scene, const SceneAnswer& answer,
                         const std::vector<float>& out, const Bound& bound);
double RmsError(const SceneAnswer& answer, const std::vector<float>& out);

// Memory on the device, from `before` on.
struct Uploaded {
  device::Buffer buffer;
  int64_t before = 0;
  std::byte* data() const { return buffer.data() + before; }
};

class CudaAttendRig {
 public:
  // Needs a GPU.
  CudaAttendRig();
  device::CudaDevice& device() { return *device_; }
  std::unique_ptr<CudaAttend> MakeAttend(int num_heads, int head_dim, ComputeType compute,
                                         bool force_simt);

  // Uploads a scene; Run may then be called for it many times, with other queries.
  void Load(const Scene& scene);
  // Attends in calls of these spans each, and returns the finished outputs.
  std::vector<float> Run(const Scene& scene, const std::vector<std::vector<int>>& calls,
                         bool force_simt);
  std::vector<float> RunAtOnce(const Scene& scene, bool force_simt);

  Uploaded Upload(const void* from, int64_t size_bytes);
  std::vector<float> Download(const std::byte* from, int64_t count);

 private:
  CudaAttend& AttendFor(const Scene& scene, bool force_simt);

  std::unique_ptr<device::CudaDevice> device_;
  Uploaded resident_;
  device::Buffer mapped_;
  std::vector<const std::byte*> blocks_;  // Of each span
  std::unique_ptr<CudaAttend> attend_;    // Of the last run, and what it was made for:
  int attend_heads_ = 0;
  int attend_dim_ = 0;
  bool attend_simt_ = false;
};

template <typename Bound>
std::string FaultInScene(const Scene& scene, const SceneAnswer& answer,
                         const std::vector<float>& out, const Bound& bound) {
  for (size_t i = 0; i < out.size(); ++i) {
    const double error = std::fabs(out[i] - answer.out[i]);
    if (error <= bound(i)) continue;
    const int v_dim = scene.kv.v_dim;
    return scene.Name() + ": row " + std::to_string(i / v_dim / scene.num_heads) + " head " +
           std::to_string(i / v_dim % scene.num_heads) + " dim " + std::to_string(i % v_dim) +
           " is " + std::to_string(out[i]) + ", should be " + std::to_string(answer.out[i]) +
           " within " + std::to_string(bound(i));
  }
  return {};
}

}  // namespace writescope::ops
