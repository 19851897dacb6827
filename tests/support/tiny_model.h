// A checkpoint loaded onto the device under test (test_device.h) with a runner around it, for tests
// below the engine's front door.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/device/device.h"
#include "engine/model/config.h"
#include "engine/model/device_weights.h"
#include "engine/model/weights.h"
#include "engine/ops/ops.h"
#include "engine/runtime/model_runner.h"

namespace writescope::testing {

struct TinyModelOptions {
  std::string dir;
  bool dummy = false;  // A folder with a config only: random weights
  KvDtype kv_dtype = KvDtype::kF32;
  ops::WeightFormat experts = ops::WeightFormat::kSource;
  int prefill_chunk = 2048;
  int max_sequences = 4;
  std::array<int64_t, kvcache::kNumRegions> blocks{};  // device, stream, swing, host
  int workers = 2;
  int device_threads = 1;
  int64_t ring_bytes = 256 << 10;
  double link_bytes_per_s = 0;
  bool prefix_cache = true;
  bool verify = true;
  absl::Duration wait_limit = absl::Seconds(10);
  int max_recordings = 0;
};

struct TinyModel {
  model::ModelConfig config;
  std::unique_ptr<device::Device> device;
  std::unique_ptr<ops::Ops> ops;
  std::unique_ptr<model::DeviceWeights> weights;
  std::unique_ptr<runtime::ModelRunner> runner;

  static absl::StatusOr<std::unique_ptr<TinyModel>> Load(const TinyModelOptions& options);
};

// One sequence driven by hand.
class Driver {
 public:
  explicit Driver(TinyModel& model, int64_t expected_blocks = 64);
  ~Driver();
  // Runs tokens in chunks and returns the logits of all (or only the last) of them.
  absl::StatusOr<std::vector<std::vector<float>>> Feed(const std::vector<TokenId>& tokens,
                                                       int chunk, bool all_logits,
                                                       const attention::SharePlan& share);
  int slot() const { return slot_; }
  const runtime::StepResult& last_step() const { return last_step_; }

 private:
  TinyModel& model_;
  int slot_;
  runtime::StepResult last_step_;
};

}  // namespace writescope::testing
