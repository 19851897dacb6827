#include "engine/ops/cuda/attend_plan.h"

#include <algorithm>
#include <cstring>

#include "engine/base/check.h"
#include "engine/base/units.h"

namespace writescope::ops {

using kernels::FoldPart;
using kernels::FoldRow;
using kernels::KvSpan;
using kernels::Panel;
using kernels::PanelRow;
using kernels::SliceSizes;
using kernels::TileReader;
using kernels::TileSizes;

namespace {

// Bytes of the arrays that a panel may need.
int64_t PanelBytes(int num_rows) {
  return int64_t{sizeof(Panel)} +
         num_rows * int64_t{sizeof(PanelRow) + sizeof(FoldRow) + sizeof(FoldPart)};
}

}  // namespace

void SlicePlanner::Plan(const AttendArgs& args, const ReaderFilter& filter,
                        const SliceLimits& limits, Launch launch) {
  args_ = &args;
  filter_ = filter;
  limits_ = limits;
  launch_ = &launch;
  const int group = args.num_heads / args.kv.num_kv_heads;
  panel_heads_ = std::min(group, kernels::kPanelSlots);
  panel_rows_ = kernels::kPanelSlots / panel_heads_;
  head_blocks_ = static_cast<int>(CeilDiv(group, panel_heads_));
  for (const AttendSpan& span : args.spans) {
    if (span.num_tokens > 0) AddSpan(span);
  }
  Emit();
}

void SlicePlanner::AddSpan(const AttendSpan& span) {
  span_rows_.clear();
  for (int i = 0; i < span.num_readers; ++i) {
    const ReaderRows& reader = args_->rows[args_->readers[span.first_reader + i]];
    if (!filter_.Takes(reader)) continue;
    // Rows before the span see nothing of it.
    const int64_t unseeing =
        std::clamp<int64_t>(span.first_position - reader.first_position, 0, reader.num_rows);
    for (int row = static_cast<int>(unseeing); row < reader.num_rows; ++row) {
      span_rows_.push_back(
          {.visible = reader.first_position + row + 1, .row = reader.first_row + row, .fold = 0});
    }
  }
  AddPanels(span);
}

void SlicePlanner::AddPanels(const AttendSpan& span) {
  const int group = args_->num_heads / args_->kv.num_kv_heads;
  const int num_rows = static_cast<int>(span_rows_.size());
  for (int first = 0; first < num_rows; first += panel_rows_) {
    const int count = std::min(panel_rows_, num_rows - first);
    int64_t visible = 0;
    for (int i = 0; i < count; ++i) visible = std::max(visible, span_rows_[first + i].visible);
    const int num_tokens =
        static_cast<int>(std::min<int64_t>(span.num_tokens, visible - span.first_position));
    // Half of the room is for panels, half for the borders of chunks.
    const int num_slots = std::max(num_slots_, count * panel_heads_);
    const int64_t max_slices = limits_.max_partials / (args_->kv.num_kv_heads * num_slots);
    const int64_t bytes = static_cast<int64_t>(panels_.size()) * int64_t{sizeof(Panel)} +
                          static_cast<int64_t>(rows_.size()) *
                              int64_t{sizeof(PanelRow) + sizeof(FoldRow) + sizeof(FoldPart)};
    if (static_cast<int64_t>(panels_.size()) + head_blocks_ > max_slices / 2 ||
        bytes + head_blocks_ * PanelBytes(count) > limits_.max_array_bytes) {
      Emit();
    }
    num_slots_ = std::max(num_slots_, count * panel_heads_);
    for (int block = 0; block < head_blocks_; ++block) {
      const int first_head = block * panel_heads_;
      panels_.push_back(
          {.span = {.base = span.base,
                    .first_position = span.first_position,
                    .layer_stride_bytes = span.layer_stride_bytes,
                    .num_tokens = num_tokens,
                    .first_block = 0},
           .first_block = num_blocks_,
           .first_row = static_cast<int>(rows_.size()),
           .num_rows = static_cast<int16_t>(count),
           .first_head = static_cast<int16_t>(first_head),
           .num_heads = static_cast<int16_t>(std::min(panel_heads_, group - first_head)),
           .reserved = 0});
      rows_.insert(rows_.end(), span_rows_.begin() + first, span_rows_.begin() + first + count);
      num_blocks_ += static_cast<int>(CeilDiv(num_tokens, kBlockTokens));
    }
  }
}

// A fold for each row and block of heads, in the order in which panels first name them.
void SlicePlanner::MakeFolds() {
  folds_.clear();
  const auto key_of = [&](int row, int first_head) {
    return static_cast<size_t>(row) * static_cast<size_t>(head_blocks_) +
           static_cast<size_t>(first_head / panel_heads_);
  };
  for (const Panel& panel : panels_) {
    for (int i = 0; i < panel.num_rows; ++i) {
      PanelRow& row = rows_[panel.first_row + i];
      const size_t key = key_of(row.row, panel.first_head);
      if (key >= fold_of_key_.size()) fold_of_key_.resize(key + 1, -1);
      int& fold = fold_of_key_[key];
      if (fold < 0) {
        fold = static_cast<int>(folds_.size());
        folds_.push_back({.row = row.row,
                          .first_head = panel.first_head,
                          .num_heads = panel.num_heads,
                          .first_part = 0,
                          .num_parts = 0,
                          .num_slices = 0});
      }
      row.fold = fold;
      ++folds_[fold].num_parts;
    }
  }
  int next_part = 0;
  for (FoldRow& fold : folds_) {
    fold_of_key_[key_of(fold.row, fold.first_head)] = -1;
    fold.first_part = next_part;
    next_part += fold.num_parts;
  }
}

// Parts lie fold by fold, those of a fold in the order of its panels.
void SlicePlanner::MakeParts(const SliceSizes& sizes) {
  parts_.resize(rows_.size());
  next_parts_.clear();
  for (const FoldRow& fold : folds_) next_parts_.push_back(fold.first_part);
  for (size_t p = 0; p < panels_.size(); ++p) {
    const Panel& panel = panels_[p];
    const int last_block =
        panel.first_block + static_cast<int>(CeilDiv(panel.span.num_tokens, kBlockTokens)) - 1;
    const int first_chunk = ChunkOf(sizes, panel.first_block);
    const int num_slices = ChunkOf(sizes, last_block) - first_chunk + 1;
    for (int i = 0; i < panel.num_rows; ++i) {
      const int fold = rows_[panel.first_row + i].fold;
      parts_[next_parts_[fold]++] = {.first_slice = first_chunk + static_cast<int>(p),
                                     .num_slices = num_slices,
                                     .first_slot = i * panel.num_heads};
      folds_[fold].num_slices += num_slices;
    }
  }
}

void SlicePlanner::Emit() {
  if (!panels_.empty()) {
    MakeFolds();
    const int64_t max_slices = limits_.max_partials / (args_->kv.num_kv_heads * num_slots_);
    const int64_t max_chunks =
        std::min<int64_t>(max_slices / 2, limits_.max_thread_blocks / args_->kv.num_kv_heads);
    const int64_t chunks = std::min(max_chunks, CeilDiv(num_blocks_, limits_.min_chunk_blocks));
    SliceSizes sizes = {.num_panels = static_cast<int>(panels_.size()),
                        .num_blocks = num_blocks_,
                        .num_chunks = static_cast<int>(std::max<int64_t>(1, chunks)),
                        .num_slots = num_slots_,
                        .num_rows = static_cast<int>(rows_.size()),
                        .num_folds = static_cast<int>(folds_.size()),
                        .num_parts = static_cast<int>(rows_.size()),
                        .max_fold_slices = 0};
    CHECK_LE(int64_t{NumSlices(sizes)} * args_->kv.num_kv_heads * num_slots_, limits_.max_partials);
    MakeParts(sizes);
    for (const FoldRow& fold : folds_) {
      sizes.max_fold_slices = std::max(sizes.max_fold_slices, fold.num_slices);
    }
    arrays_.resize(static_cast<size_t>(SliceArrayBytes(sizes)));
    std::byte* at = arrays_.data();
    const auto append = [&](const auto& values) {
      const size_t bytes = values.size() * sizeof(values[0]);
      std::memcpy(at, values.data(), bytes);
      at += bytes;
    };
    append(panels_);
    append(rows_);
    append(folds_);
    append(parts_);
    (*launch_)(sizes, arrays_);
  }
  panels_.clear();
  rows_.clear();
  num_blocks_ = 0;
  num_slots_ = 0;
}

void TilePlanner::Plan(const AttendArgs& args, const ReaderFilter& filter, const TileLimits& limits,
                       Launch launch) {
  CHECK_GE(limits.max_blocks, 1);
  constexpr int64_t kReadBytes = sizeof(KvSpan) + sizeof(TileReader);
  reads_.clear();
  num_blocks_ = 0;
  for (const AttendSpan& span : args.spans) {
    if (span.num_tokens == 0) continue;
    for (int i = 0; i < span.num_readers; ++i) {
      const int reader = args.readers[span.first_reader + i];
      const ReaderRows& rows = args.rows[reader];
      if (!filter.Takes(rows)) continue;
      if (rows.first_position + rows.num_rows <= span.first_position) continue;
      for (int64_t done = 0; done < span.num_blocks;) {
        const bool fits =
            static_cast<int64_t>(reads_.size() + 1) * kReadBytes <= limits.max_array_bytes;
        if (!fits || num_blocks_ == limits.max_blocks) Emit(args, limits, launch);
        const int64_t blocks = std::min(span.num_blocks - done, limits.max_blocks - num_blocks_);
        const int64_t tokens =
            std::min(blocks * kBlockTokens, span.num_tokens - done * kBlockTokens);
        reads_.push_back({.reader = reader,
                          .span = {.base = span.base + done * args.kv.block_bytes(),
                                   .first_position = span.first_position + done * kBlockTokens,
                                   .layer_stride_bytes = span.layer_stride_bytes,
                                   .num_tokens = static_cast<int>(tokens),
                                   .first_block = 0}});
        num_blocks_ += blocks;
        done += blocks;
      }
    }
  }
  Emit(args, limits, launch);
}

void TilePlanner::Emit(const AttendArgs& args, const TileLimits& limits, Launch launch) {
  if (reads_.empty()) return;
  read_counts_.assign(args.rows.size(), 0);
  for (const Read& read : reads_) ++read_counts_[read.reader];
  TileSizes sizes = {.num_readers = static_cast<int>(std::count_if(
                         read_counts_.begin(), read_counts_.end(), [](int n) { return n > 0; })),
                     .num_spans = static_cast<int>(reads_.size()),
                     .num_tiles = 0,
                     .num_blocks = static_cast<int>(num_blocks_)};
  arrays_.resize(static_cast<size_t>(TileArrayBytes(sizes)));
  auto* readers = reinterpret_cast<TileReader*>(arrays_.data());
  auto* spans = reinterpret_cast<KvSpan*>(readers + sizes.num_readers);
  int next_span = 0;
  TileReader* next = readers;
  for (size_t r = 0; r < args.rows.size(); ++r) {
    if (read_counts_[r] == 0) continue;
    const ReaderRows& rows = args.rows[r];
    *next++ = {.first_position = rows.first_position,
               .first_row = rows.first_row,
               .num_rows = rows.num_rows,
               .first_tile = sizes.num_tiles,
               .first_span = next_span,
               .num_spans = read_counts_[r],
               .first_block = 0};
    sizes.num_tiles +=
        static_cast<int>(CeilDiv(int64_t{rows.num_rows} * limits.group, limits.tile_rows));
    // From here on: where the reader's next span goes.
    const int first_span = next_span;
    next_span += read_counts_[r];
    read_counts_[r] = first_span;
  }
  for (const Read& read : reads_) spans[read_counts_[read.reader]++] = read.span;
  int blocks = 0;
  for (TileReader* reader = readers; reader != next; ++reader) {
    reader->first_block = blocks;
    for (int s = 0; s < reader->num_spans; ++s) {
      KvSpan& span = spans[reader->first_span + s];
      span.first_block = blocks;
      blocks += static_cast<int>(CeilDiv(int64_t{span.num_tokens}, kBlockTokens));
    }
  }
  launch(sizes, arrays_);
  reads_.clear();
  num_blocks_ = 0;
}

}  // namespace writescope::ops
