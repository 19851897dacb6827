// Attention on the CPU device.
//
// The unit of parallel work is a set of rows and a KV head: one thread takes these rows through all
// their spans in order, so a running state has one writer and the order of additions is fixed. Rows
// of readers that share a span stay together, so that the span is read once for all of them.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "engine/base/check.h"
#include "engine/kernels/attention_partial.h"
#include "engine/ops/cpu_ops_impl.h"

namespace writescope::ops {

// AttendArgs with copies of its arrays.
struct AttendCall {
  AttendArgs args;
  std::vector<AttendSpan> spans;
  std::vector<int> readers;
  std::vector<ReaderRows> rows;
};

namespace {

// A query row: whose, which, and how far it sees.
struct QueryRow {
  int reader;
  int row;
  int64_t position;
};

// Readers that are joined by shared spans, directly or through others.
struct Cluster {
  std::vector<int> spans;  // In order
  std::vector<QueryRow> rows;
};

int FindRoot(std::vector<int>& parent, int reader) {
  while (parent[reader] != reader) reader = parent[reader] = parent[parent[reader]];
  return reader;
}

std::vector<Cluster> FindClusters(const AttendCall& call) {
  const int num_readers = static_cast<int>(call.rows.size());
  std::vector<int> parent(num_readers);
  std::iota(parent.begin(), parent.end(), 0);
  for (const AttendSpan& span : call.spans) {
    for (int i = 1; i < span.num_readers; ++i) {
      parent[FindRoot(parent, call.readers[span.first_reader + i])] =
          FindRoot(parent, call.readers[span.first_reader]);
    }
  }
  std::vector<Cluster> of_root(num_readers);
  for (size_t i = 0; i < call.spans.size(); ++i) {
    const AttendSpan& span = call.spans[i];
    if (span.num_readers == 0 || span.num_tokens == 0) continue;
    of_root[FindRoot(parent, call.readers[span.first_reader])].spans.push_back(static_cast<int>(i));
  }
  std::vector<Cluster> clusters;
  for (int reader = 0; reader < num_readers; ++reader) {
    Cluster& cluster = of_root[FindRoot(parent, reader)];
    if (cluster.spans.empty()) continue;
    const ReaderRows& rows = call.rows[reader];
    for (int i = 0; i < rows.num_rows; ++i) {
      cluster.rows.push_back({reader, rows.first_row + i, rows.first_position + i});
    }
  }
  for (Cluster& cluster : of_root) {
    if (!cluster.rows.empty()) clusters.push_back(std::move(cluster));
  }
  return clusters;
}

bool ReadsSpan(const AttendCall& call, const AttendSpan& span, int reader) {
  const auto first = call.readers.begin() + span.first_reader;
  return std::find(first, first + span.num_readers, reader) != first + span.num_readers;
}

// Kernel rows that an item aims at: enough to use a block many times while it is in cache, few
// enough that their states stay there too.
constexpr int kItemKernelRows = 128;
// Heads of a group are divided between threads down to this many: fewer would leave a group of the
// kernel unfilled.
constexpr int kItemHeadsMin = 4;
// Blocks that are given to the kernel at a time.
constexpr int kCallBlocks = 64;

}  // namespace

struct AttendItem {
  const Cluster* cluster;
  int first_row;  // Of the cluster's rows
  int num_rows;
  int kv_head;
  int first_head;  // Query heads of this KV head
  int num_heads;
};

namespace {

std::vector<AttendItem> MakeItems(const AttendArgs& args, const std::vector<Cluster>& clusters,
                                  int num_threads) {
  const int group = args.num_heads / args.kv.num_kv_heads;
  const int rows_per_item = std::max(1, kItemKernelRows / group);
  int64_t num_items = 0;
  for (const Cluster& cluster : clusters) {
    num_items += CeilDiv(static_cast<int64_t>(cluster.rows.size()), rows_per_item);
  }
  num_items *= args.kv.num_kv_heads;
  // Too few for the team: heads of a group apart, though each then reads the keys. A row's
  // arithmetic does not depend on its company, so this changes speed only.
  int heads_per_item = group;
  while (num_items < num_threads && heads_per_item >= 2 * kItemHeadsMin) {
    heads_per_item = (heads_per_item + 1) / 2;
    num_items *= 2;
  }
  std::vector<AttendItem> items;
  for (const Cluster& cluster : clusters) {
    const int num_rows = static_cast<int>(cluster.rows.size());
    for (int first = 0; first < num_rows; first += rows_per_item) {
      for (int kv_head = 0; kv_head < args.kv.num_kv_heads; ++kv_head) {
        for (int head = 0; head < group; head += heads_per_item) {
          items.push_back({.cluster = &cluster,
                           .first_row = first,
                           .num_rows = std::min(rows_per_item, num_rows - first),
                           .kv_head = kv_head,
                           .first_head = head,
                           .num_heads = std::min(heads_per_item, group - head)});
        }
      }
    }
  }
  return items;
}

void CheckAttend(const AttendArgs& args) {
  CHECK(args.kv.num_kv_heads > 0 && args.num_heads % args.kv.num_kv_heads == 0)
      << args.num_heads << " heads on " << args.kv.num_kv_heads << " KV heads";
  CHECK(args.kv.k_dim % kDimMultiple == 0 && args.kv.v_dim % kDimMultiple == 0);
  CHECK(!args.kv.value_in_key || args.kv.v_dim <= args.kv.k_dim);
  for (const AttendSpan& span : args.spans) {
    CHECK(span.num_tokens >= 0 && span.num_tokens <= int64_t{span.num_blocks} * kBlockTokens &&
          span.num_tokens > int64_t{span.num_blocks - 1} * kBlockTokens)
        << span.num_tokens << " tokens in " << span.num_blocks << " blocks";
    CHECK(span.first_reader >= 0 && span.num_readers >= 0 &&
          span.first_reader + span.num_readers <= static_cast<int>(args.readers.size()));
  }
  for (const int reader : args.readers) {
    CHECK(reader >= 0 && reader < static_cast<int>(args.rows.size())) << "reader " << reader;
  }
}

}  // namespace

void CpuOps::Attend(const AttendArgs& args) {
  CheckAttend(args);
  AttendCall call = {.args = args,
                     .spans = {args.spans.begin(), args.spans.end()},
                     .readers = {args.readers.begin(), args.readers.end()},
                     .rows = {args.rows.begin(), args.rows.end()}};
  device_.compute().Launch([this, call = std::move(call)] { RunAttend(call); });
}

void CpuOps::RunAttend(const AttendCall& call) {
  const std::vector<Cluster> clusters = FindClusters(call);
  double work_us = 0;
  for (const AttendSpan& span : call.spans) {
    int64_t rows = 0;
    for (int i = 0; i < span.num_readers; ++i) {
      rows += call.rows[call.readers[span.first_reader + i]].num_rows;
    }
    work_us += 2.0 * static_cast<double>(span.num_tokens * rows) * call.args.num_heads *
               (call.args.kv.k_dim + call.args.kv.v_dim) / kFlopsPerUs;
  }
  const std::vector<AttendItem> items =
      MakeItems(call.args, clusters, device_.team().num_threads());
  ForItems(static_cast<int64_t>(items.size()), work_us,
           [&](int64_t i, int thread) { RunAttendItem(call, items[i], scratch_[thread]); });
}

// Takes the item's rows through the cluster's spans.
void CpuOps::RunAttendItem(const AttendCall& call, const AttendItem& item, Scratch& scratch) {
  const AttendArgs& args = call.args;
  const KvGeometry& kv = args.kv;
  const int group = args.num_heads / kv.num_kv_heads;
  for (const int span_index : item.cluster->spans) {
    const AttendSpan& span = call.spans[span_index];
    scratch.q.clear();
    scratch.o.clear();
    scratch.m.clear();
    scratch.l.clear();
    scratch.visible.clear();
    bool masked = false;
    for (int i = 0; i < item.num_rows; ++i) {
      const QueryRow& query = item.cluster->rows[item.first_row + i];
      if (!ReadsSpan(call, span, query.reader)) continue;
      if (query.position < span.first_position) continue;
      masked |= span.first_position + span.num_tokens > query.position + 1;
      for (int head = 0; head < item.num_heads; ++head) {
        const int64_t at =
            int64_t{query.row} * args.num_heads + item.kv_head * group + item.first_head + head;
        scratch.q.push_back(args.q + at * kv.k_dim);
        scratch.o.push_back(args.state.o + at * kv.v_dim);
        scratch.m.push_back(args.state.m + at);
        scratch.l.push_back(args.state.l + at);
        scratch.visible.push_back(query.position + 1);
      }
    }
    if (scratch.q.empty()) continue;
    for (int first = 0; first < span.num_blocks; first += kCallBlocks) {
      const int num_blocks = std::min(kCallBlocks, span.num_blocks - first);
      kernels::KvHeadBlock blocks[kCallBlocks];
      for (int b = 0; b < num_blocks; ++b) {
        const int64_t index = first + b;
        const std::byte* k = span.base + index * kv.block_bytes() + item.kv_head * kv.head_bytes();
        blocks[b] = {.k = k,
                     .v = k + kv.k_plane_bytes(),
                     .num_tokens = static_cast<int>(
                         std::min<int64_t>(kBlockTokens, span.num_tokens - index * kBlockTokens)),
                     .first_position = span.first_position + index * kBlockTokens};
      }
      kernels::ActiveAttentionVariant().run({.k_dim = kv.k_dim,
                                             .v_dim = kv.v_dim,
                                             .value_in_key = kv.value_in_key,
                                             .dtype = kv.dtype,
                                             .blocks = {blocks, static_cast<size_t>(num_blocks)},
                                             .num_rows = static_cast<int>(scratch.q.size()),
                                             .q = scratch.q.data(),
                                             .visible = masked ? scratch.visible.data() : nullptr,
                                             .o = scratch.o.data(),
                                             .m = scratch.m.data(),
                                             .l = scratch.l.data()});
    }
  }
}

void CpuOps::ResetAttention(int num_rows, int num_heads, int v_dim, const AttendState& state) {
  device_.compute().Launch([=] {
    const int64_t count = int64_t{num_rows} * num_heads;
    std::fill_n(state.o, count * v_dim, 0.0f);
    std::fill_n(state.m, count, kernels::kEmptyLse);
    std::fill_n(state.l, count, 0.0f);
  });
}

void CpuOps::MergeAttention(const MergeArgs& args) {
  CHECK_LE(args.out_dim, args.kv.v_dim);
  device_.compute().Launch([this, args] { RunMerge(args); });
}

void CpuOps::RunMerge(const MergeArgs& args) {
  const int v_dim = args.kv.v_dim;
  const double work_us = 16.0 * args.num_rows * args.num_heads * v_dim / kBytesPerUs;
  const bool with_cpu = args.cpu_out != nullptr && !device_.compute().failed();
  ForItems(args.num_rows, work_us, [&](int64_t row, int thread) {
    std::vector<float>& partial = scratch_[thread].row;
    if (static_cast<int>(partial.size()) < v_dim) partial.resize(v_dim);
    for (int64_t at = row * args.num_heads; at < (row + 1) * args.num_heads; ++at) {
      float lse = kernels::kEmptyLse;
      kernels::FinishPartial(v_dim, args.state.o + at * v_dim, args.state.m[at], args.state.l[at],
                             partial.data(), &lse);
      if (with_cpu) {
        kernels::MergePartial(v_dim, partial.data(), &lse, args.cpu_out + at * v_dim,
                              args.cpu_lse[at]);
        args.cpu_lse[at] = kernels::kEmptyLse;
      }
      std::copy_n(partial.data(), args.out_dim, static_cast<float*>(args.out) + at * args.out_dim);
    }
  });
}

}  // namespace writescope::ops
