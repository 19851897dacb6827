// Shares out a call of attention for the kernels of kernels/cuda/attend_work.h. Pure: no GPU is
// needed to run or test it. It runs for every layer and wave, so it keeps its memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "engine/kernels/cuda/attend_work.h"
#include "engine/ops/ops.h"

namespace writescope::ops {

// Readers of at least `min_rows` and at most `max_rows` query rows; others are left out.
struct ReaderFilter {
  int min_rows = 1;
  int max_rows = 0;
  bool Takes(const ReaderRows& rows) const {
    return rows.num_rows >= min_rows && rows.num_rows <= max_rows;
  }
};

struct SliceLimits {
  int64_t max_partials = 0;  // Room for partials: (row, head)s of slices
  int64_t max_array_bytes = 0;
  int max_thread_blocks = 0;  // That run at once
  int min_chunk_blocks = 1;   // Less is not worth a thread block.
};

class SlicePlanner {
 public:
  using Launch =
      absl::FunctionRef<void(const kernels::SliceSizes& sizes, std::span<const std::byte> arrays)>;

  // Calls `launch` for each pass: one, unless there is no room for all partials at once.
  void Plan(const AttendArgs& args, const ReaderFilter& filter, const SliceLimits& limits,
            Launch launch);

 private:
  void AddSpan(const AttendSpan& span);
  void AddPanels(const AttendSpan& span);
  void Emit();
  void MakeFolds();
  void MakeParts(const kernels::SliceSizes& sizes);

  // Of the call.
  const AttendArgs* args_ = nullptr;
  ReaderFilter filter_;
  SliceLimits limits_;
  const Launch* launch_ = nullptr;
  int panel_heads_ = 0;  // Heads of a group in a panel
  int panel_rows_ = 0;   // Rows that fit into a panel
  int head_blocks_ = 0;  // Panels that a group's heads need

  std::vector<kernels::PanelRow> span_rows_;  // Of the span in work

  // Of the pass.
  std::vector<kernels::Panel> panels_;
  std::vector<kernels::PanelRow> rows_;
  int num_blocks_ = 0;
  int num_slots_ = 0;
  std::vector<kernels::FoldRow> folds_;
  std::vector<kernels::FoldPart> parts_;
  std::vector<int> fold_of_key_;  // By row * head_blocks_ + block of heads; -1 between passes
  std::vector<int> next_parts_;   // By fold
  std::vector<std::byte> arrays_;
};

struct TileLimits {
  int tile_rows = 1;
  int64_t max_array_bytes = 0;
  int64_t max_blocks = 0;  // Of the spans of a pass, as often as they are read; at least 1
  int group = 1;           // Heads that read the same keys
};

class TilePlanner {
 public:
  using Launch =
      absl::FunctionRef<void(const kernels::TileSizes& sizes, std::span<const std::byte> arrays)>;

  // Calls `launch` for each pass: one, unless the spans are more than the limits allow.
  void Plan(const AttendArgs& args, const ReaderFilter& filter, const TileLimits& limits,
            Launch launch);

 private:
  // Of a span, or of a part of it.
  struct Read {
    int reader;
    kernels::KvSpan span;
  };
  void Emit(const AttendArgs& args, const TileLimits& limits, Launch launch);

  std::vector<Read> reads_;       // Of the pass, in the order of spans
  int64_t num_blocks_ = 0;        // Of the pass
  std::vector<int> read_counts_;  // By reader
  std::vector<std::byte> arrays_;
};

}  // namespace writescope::ops
