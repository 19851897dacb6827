// The inputs of a staged step (Ops::StageStep), kept by the host.
#pragma once

#include <vector>

#include "engine/ops/ops.h"

namespace writescope::ops {

// Engine thread.
class StagedStep {
 public:
  void Assign(const StepInputs& inputs);

  int num_rows() const { return static_cast<int>(tokens_.size()); }
  const KvGeometry& kv() const { return kv_; }
  int num_heads() const { return num_heads_; }
  std::span<const TokenId> tokens() const { return tokens_; }
  std::span<const int64_t> positions() const { return positions_; }
  // As given: for layer 0.
  std::span<const KvTarget> targets() const { return targets_; }
  // What a layer's calls take: valid until the next.
  std::span<const KvTarget> TargetsOf(int layer);
  AttendArgs AttendArgsOf(int layer, const float* q, const AttendState& state);

 private:
  KvGeometry kv_;
  int num_heads_ = 0;
  std::vector<TokenId> tokens_;
  std::vector<int64_t> positions_;
  std::vector<KvTarget> targets_, layer_targets_;
  std::vector<AttendSpan> spans_, layer_spans_;
  std::vector<int> readers_;
  std::vector<ReaderRows> rows_;
};

}  // namespace writescope::ops
