#include "engine/attention/cpu_attention.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <new>
#include <thread>
#include <utility>

#include "engine/attention/early_fetch.h"
#include "engine/base/bf16.h"
#include "engine/base/status_macros.h"
#include "engine/base/units.h"

namespace writescope::attention {
namespace {

constexpr int kSpinsBeforeNap = 500;
constexpr int64_t kPartValues = 512;  // Of a row's partials, merged under one lock
// Of each tile of keys, since scores begin with several tiles side by side. More would hold up the
// work that it is for: with the whole block asked for at once a block of latents takes 11 us from
// memory, with this 7.5.
constexpr int64_t kFirstBytes = 512;

int64_t NowNs() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

bool HaveSameReaders(const StepAttention& attention, const Run& a, const Run& b) {
  return std::ranges::equal(ReadersOf(attention.runs, a), ReadersOf(attention.runs, b));
}

// Asks for a line as its only owner, so that neither a load nor a store of it waits. In assembly:
// without a flag of its own for the instruction the compiler makes this a fetch for reading.
void FetchToWrite(const void* line) {
  asm volatile("prefetchw %0" : : "m"(*static_cast<const std::byte*>(line)));
}

// The reader's row in a decode step, by number of the whole step's.
int RowOf(const StepAttention& attention, int reader) {
  return attention.first_row + attention.rows[static_cast<size_t>(reader)].first_row;
}

int64_t QueryRowBytes(const CpuAttention::Options& o) {
  return o.num_heads * int64_t{o.geometry.k_dim} * KvDtypeBytes(o.query_dtype);
}
int64_t QueryBytes(const CpuAttention::Options& o) {
  return RoundUp(o.max_rows * QueryRowBytes(o), 64);
}
int64_t OutBytes(const CpuAttention::Options& o) {
  return RoundUp(int64_t{4} * o.max_rows * o.num_heads * o.geometry.v_dim, 64);
}
int64_t LseBytes(const CpuAttention::Options& o) {
  return RoundUp(int64_t{4} * o.max_rows * o.num_heads, 64);
}

}  // namespace

const kernels::AttentionVariant& CpuAttention::VariantFor(const KvGeometry& geometry, int num_heads,
                                                          kernels::AttentionProducts products) {
  // Up to this many rows the f32 kernels are no slower than those that round (bench_cpu_attention,
  // group 4 at 64K tokens: 0.93 of reading and 0.88 on Zen 5), but for AMX (144 GB/s, and 134 with
  // avx512, on Emerald Rapids).
  constexpr int kFewRows = 4;
  const kernels::AttentionVariant& fastest = kernels::ActiveAttentionVariant(products);
  const bool is_few = !geometry.value_in_key && num_heads / geometry.num_kv_heads <= kFewRows;
  return is_few && fastest.isa != CpuIsa::kAmx ? kernels::ActiveAttentionVariant() : fastest;
}

int64_t CpuAttention::HostBytes(const Options& options) {
  return QueryBytes(options) + OutBytes(options) + LseBytes(options) +
         RoundUp(static_cast<int64_t>(sizeof(HandoffFlags)) * options.max_turns, 64);
}

absl::StatusOr<std::unique_ptr<CpuAttention>> CpuAttention::Create(const Options& options,
                                                                   device::Device& device) {
  ASSIGN_OR_RETURN(device::Buffer handoff,
                   device.AllocateHost(HostBytes(options), device::HostMemory::kPageLocked,
                                       "queries and partials"));
  return std::unique_ptr<CpuAttention>(new CpuAttention(options, std::move(handoff)));
}

CpuAttention::CpuAttention(const Options& options, device::Buffer handoff)
    : options_(options),
      variant_(*options.variant),
      handoff_(std::move(handoff)),
      query_row_bytes_(QueryRowBytes(options)),
      workers_(static_cast<size_t>(options.num_workers)),
      claims_(options.geometry, options.num_workers),
      heads_a_part_(std::clamp<int64_t>(kPartValues / options.geometry.v_dim, 1, Part::kMaxHeads)),
      parts_a_row_((options.num_heads + heads_a_part_ - 1) / heads_a_part_),
      parts_(static_cast<size_t>(options.max_rows * parts_a_row_)),
      rows_(static_cast<size_t>(options.max_rows)) {
  std::byte* const out = handoff_.data() + QueryBytes(options);
  std::byte* const lse = out + OutBytes(options);
  queries_ = handoff_.data();
  out_ = reinterpret_cast<float*>(out);
  lse_ = reinterpret_cast<float*>(lse);
  flags_ = reinterpret_cast<HandoffFlags*>(lse + LseBytes(options));
  for (int turn = 0; turn < options.max_turns; ++turn) new (flags_ + turn) HandoffFlags();
  const size_t slots = static_cast<size_t>(options.max_rows) + kMaxLeft;
  const size_t heads = slots * static_cast<size_t>(options.num_heads);
  for (Worker& worker : workers_) {
    worker.o.resize(heads * static_cast<size_t>(options.geometry.v_dim));
    worker.m.resize(heads);
    worker.l.resize(heads);
    worker.slots = std::vector<Worker::Slot>(slots);
    worker.slot_of.resize(static_cast<size_t>(options.max_rows), -1);
    worker.left_slot.resize(static_cast<size_t>(options.max_rows));
    worker.kept.resize(kernels::KeptState::kBytes / sizeof(Worker::Line));
  }
  ResetPartials(options.max_rows);
}

void CpuAttention::ResetPartials(int num_rows) {
  ++num_steps_;
  std::fill_n(lse_, static_cast<int64_t>(num_rows) * options_.num_heads, kernels::kEmptyLse);
  for (Worker& worker : workers_) {
    for (const int row : worker.touched_rows) worker.slot_of[static_cast<size_t>(row)] = -1;
    worker.touched_rows.clear();
    worker.is_kept = false;
    for (Worker::Slot& slot : worker.slots) {
      slot.is_used = false;
      slot.is_left = false;
    }
  }
  for (Row& row : rows_) row.workers.Clear();
  claims_.Clear();
}

void CpuAttention::RunWorker(int index, StepContext& step) {
  Worker& worker = workers_[static_cast<size_t>(index)];
  for (int turn = 0; turn < step.num_turns; ++turn) {
    if (step.hook && !step.hook(Side::kCpu, turn)) return;
    int64_t blocks = 0;
    if (claims_.Claim(index, step, turn) || claims_.HasOther(index, step, turn)) {
      if (!AwaitQuery(index, step, turn)) return;
      blocks = AttendTurn(index, step, turn);
      if (blocks < 0) return;
    }
    TurnProgress& progress = step.turns[turn];
    if (blocks > 0) {
      Flush(worker, turn);
      progress.last_report_ns.store(NowNs(), std::memory_order_relaxed);
      progress.cpu_reported.fetch_add(blocks, std::memory_order_seq_cst);
    }
    step.SignalIfDone(turn);
  }
}

bool CpuAttention::AwaitQuery(int index, StepContext& step, int turn) {
  std::vector<Run>& parts = workers_[static_cast<size_t>(index)].now;
  WorkerClaims::Slice(step, turn, claims_.left(index, turn), &parts);
  const std::atomic<uint64_t>& ready = step.flags[turn].query_ready;
  // Of two micro-batches the next query is there as a rule: there is no time to fetch more.
  if (!parts.empty()) FetchFirst(step, turn, parts.front());
  EarlyFetch fetch(step, turn, parts, options_.geometry.block_bytes());
  for (int spin = 0; ready.load(std::memory_order_acquire) < step.epoch; ++spin) {
    if (step.abort.load(std::memory_order_relaxed)) return false;
    if (fetch.Next()) continue;
    if (spin < kSpinsBeforeNap || options_.nap == absl::ZeroDuration()) {
      __builtin_ia32_pause();
    } else {
      std::this_thread::sleep_for(absl::ToChronoNanoseconds(options_.nap));
    }
  }
  return true;
}

int64_t CpuAttention::AttendTurn(int index, StepContext& step, int turn) {
  Worker& worker = workers_[static_cast<size_t>(index)];
  const StepAttention& attention = step.attention(turn);
  const auto has_begun = [&](const Run& run) {
    const int row = RowOf(attention, ReadersOf(attention.runs, run).front());
    return worker.slot_of[static_cast<size_t>(row)] >= 0;
  };
  int64_t none = 0;
  step.turns[turn].first_start_ns.compare_exchange_strong(none, NowNs(), std::memory_order_relaxed);
  int64_t blocks = 0;
  while (!step.abort.load(std::memory_order_relaxed)) {
    const WorkerClaims::Range now = claims_.Begin(index, turn);
    if (now.count == 0) {
      if (step.hook && !step.hook(Side::kCpu, turn)) return -1;
      if (!claims_.Claim(index, step, turn) &&
          !claims_.TakeFromOther(index, step, turn, has_begun, &worker.now)) {
        return blocks;
      }
      WorkerClaims::Slice(step, turn, claims_.left(index, turn), &worker.now);
      if (!worker.now.empty()) FetchFirst(step, turn, worker.now.front());
      continue;
    }
    // The next claim is made before this one is done, so that its first bytes are on their way
    // meanwhile: without it a claim begins with as many misses as a core can have.
    if (claims_.left(index, turn).count == 0 && claims_.HasPlenty(step, turn)) {
      if (step.hook && !step.hook(Side::kCpu, turn)) return -1;
      claims_.Claim(index, step, turn);
    }
    const WorkerClaims::Range left = claims_.left(index, turn);
    WorkerClaims::Slice(step, turn, now, &worker.now);
    WorkerClaims::Slice(step, turn,
                        {left.first, std::min<int64_t>(left.count, kernels::kBlocksAhead)},
                        &worker.next);
    for (size_t i = 0; i < worker.now.size(); ++i) {
      const Run* next = i + 1 < worker.now.size() ? &worker.now[i + 1]
                        : !worker.next.empty()    ? &worker.next.front()
                                                  : nullptr;
      AttendPart(worker, step, turn, worker.now[i], next);
      // Where the others still attend a merge takes none of the layer's time, which memory sets. At
      // its end all would merge at once, each into lines that another core holds.
      if (next != nullptr && !HaveSameReaders(attention, worker.now[i], *next) &&
          (claims_.IsMuch(left) || claims_.HasPlenty(step, turn))) {
        Flush(worker, turn);
      }
    }
    blocks += now.count;
  }
  return -1;
}

void CpuAttention::FetchFirst(const StepContext& step, int turn, const Run& part) const {
  const KvGeometry& kv = options_.geometry;
  const std::byte* const at =
      step.blocks->region(part.region).Address(step.layer(turn), part.first_index);
  const int64_t tile_bytes = kv.k_plane_bytes() / kTilesPerBlock;
  for (int tile = 0; tile < kTilesPerBlock; ++tile) {
    for (int64_t i = 0; i < kFirstBytes; i += 64) {
      __builtin_prefetch(at + tile * tile_bytes + i, 0, 2);
    }
  }
}

int CpuAttention::FreeSlot(const Worker& worker) const {
  // There is one: at most max_rows are in use and kMaxLeft left.
  for (int at = 0;; ++at) {
    const Worker::Slot& slot = worker.slots[static_cast<size_t>(at)];
    if (!slot.is_used && !slot.is_left.load(std::memory_order_acquire)) return at;
  }
}

void CpuAttention::Touch(Worker& worker, int turn, int row) {
  int& at = worker.slot_of[static_cast<size_t>(row)];
  if (at >= 0) return;
  at = FreeSlot(worker);
  Worker::Slot& slot = worker.slots[static_cast<size_t>(at)];
  slot.is_used = true;
  slot.has_entered = rows_[static_cast<size_t>(row)].workers.Enter(turn);
  worker.touched_rows.push_back(row);
  const int64_t heads = options_.num_heads;
  const int64_t begin = SlotHead(worker, row);
  std::fill_n(&worker.o[static_cast<size_t>(begin * options_.geometry.v_dim)],
              heads * options_.geometry.v_dim, 0.0f);
  std::fill_n(&worker.m[static_cast<size_t>(begin)], heads, kernels::kEmptyLse);
  std::fill_n(&worker.l[static_cast<size_t>(begin)], heads, 0.0f);
}

void CpuAttention::AttendPart(Worker& worker, const StepContext& step, int turn, const Run& part,
                              const Run* next) {
  const KvGeometry& kv = options_.geometry;
  const StepAttention& attention = step.attention(turn);
  const int layer = step.layer(turn);
  const int64_t heads = options_.num_heads;
  const int64_t group = heads / kv.num_kv_heads;
  const auto head_of_block = [&](const Run& run, int block, int kv_head) -> kernels::KvHeadBlock {
    const std::byte* k = step.blocks->region(run.region).Address(layer, run.first_index + block) +
                         kv_head * kv.head_bytes();
    return {.k = k,
            .v = k + kv.k_plane_bytes(),
            .num_tokens = kBlockTokens,
            .first_position = run.first_position + int64_t{block} * kBlockTokens};
  };
  const std::span<const int> readers = ReadersOf(attention.runs, part);
  const bool is_left = worker.is_kept && HaveSameReaders(attention, worker.kept_of, part);
  if (!is_left) BringKept(worker);
  for (const int reader : readers) Touch(worker, turn, RowOf(attention, reader));

  // The heads of a block lie one after the other, and so do blocks: memory is read as one stream.
  worker.blocks.clear();
  for (int block = 0; block < part.num_blocks; ++block) {
    for (int kv_head = 0; kv_head < kv.num_kv_heads; ++kv_head) {
      worker.blocks.push_back(head_of_block(part, block, kv_head));
    }
  }
  worker.next_blocks.clear();
  for (int i = 0; next != nullptr && i < kernels::kBlocksAhead; ++i) {
    if (i / kv.num_kv_heads == next->num_blocks) break;
    worker.next_blocks.push_back(head_of_block(*next, i / kv.num_kv_heads, i % kv.num_kv_heads));
  }
  FindQueries(worker, attention, readers, is_left);
  worker.o_rows.clear();
  worker.m_rows.clear();
  worker.l_rows.clear();
  for (int kv_head = 0; kv_head < kv.num_kv_heads; ++kv_head) {
    for (const int reader : readers) {
      const int64_t first = SlotHead(worker, RowOf(attention, reader)) + kv_head * group;
      for (int64_t head = first; head < first + group; ++head) {
        worker.o_rows.push_back(&worker.o[static_cast<size_t>(head * kv.v_dim)]);
        worker.m_rows.push_back(&worker.m[static_cast<size_t>(head)]);
        worker.l_rows.push_back(&worker.l[static_cast<size_t>(head)]);
      }
    }
  }
  worker.is_kept = true;
  worker.kept_of = part;
  variant_.run(CallFor(worker, is_left));
}

kernels::AttentionPartialArgs CpuAttention::CallFor(Worker& worker, bool is_left) const {
  const KvGeometry& kv = options_.geometry;
  return {
      .k_dim = kv.k_dim,
      .v_dim = kv.v_dim,
      .value_in_key = kv.value_in_key,
      .dtype = kv.dtype,
      .blocks = worker.blocks,
      .num_heads = kv.num_kv_heads,
      .next = worker.next_blocks,
      .num_rows = static_cast<int>(worker.q_rows.size()) / kv.num_kv_heads,
      .q = worker.q_rows.data(),
      .visible = nullptr,  // Sealed blocks lie before every query of a decode step.
      .o = worker.o_rows.data(),
      .m = worker.m_rows.data(),
      .l = worker.l_rows.data(),
      .kept = {.memory = worker.kept.front().bytes, .is_left = is_left, .leave = worker.is_kept}};
}

void CpuAttention::BringKept(Worker& worker) {
  if (!worker.is_kept) return;
  worker.is_kept = false;
  worker.blocks.clear();
  worker.next_blocks.clear();
  variant_.run(CallFor(worker, /*is_left=*/true));
}

void CpuAttention::FindQueries(Worker& worker, const StepAttention& attention,
                               std::span<const int> readers, bool is_left) const {
  // Those of the call before are where they were.
  if (is_left) return;
  const KvGeometry& kv = options_.geometry;
  const int64_t group = options_.num_heads / kv.num_kv_heads;
  const bool is_narrow = options_.query_dtype == KvDtype::kBf16;
  const int64_t num_rows = options_.num_heads * static_cast<int64_t>(readers.size());
  if (is_narrow) worker.widened.resize(static_cast<size_t>(num_rows * kv.k_dim));
  worker.q_rows.clear();
  for (int kv_head = 0; kv_head < kv.num_kv_heads; ++kv_head) {
    for (const int reader : readers) {
      const int64_t first =
          RowOf(attention, reader) * int64_t{options_.num_heads} + kv_head * group;
      for (int64_t g = 0; g < group; ++g) {
        const std::byte* const q =
            queries_ + (first + g) * kv.k_dim * KvDtypeBytes(options_.query_dtype);
        if (!is_narrow) {
          worker.q_rows.push_back(reinterpret_cast<const float*>(q));
          continue;
        }
        float* const to = &worker.widened[worker.q_rows.size() * static_cast<size_t>(kv.k_dim)];
        const auto* const from = reinterpret_cast<const uint16_t*>(q);
        for (int d = 0; d < kv.k_dim; ++d) to[d] = Bf16ToFloat(from[d]);
        worker.q_rows.push_back(to);
      }
    }
  }
}

void CpuAttention::Flush(Worker& worker, int turn) {
  BringKept(worker);
  LeaveToOthers(worker, turn);
  const int64_t num_parts = static_cast<int64_t>(worker.touched_rows.size()) * parts_a_row_;
  const int64_t of_turn = num_steps_ * options_.max_turns + turn;
  // Workers end a layer at the same time, with the same rows: each begins elsewhere, and leaves a
  // part that another one has for later. To sleep until it is free would cost more than all parts.
  const int64_t first = num_parts * (&worker - workers_.data()) / options_.num_workers;
  worker.parts.clear();
  for (int64_t i = 0; i < num_parts; ++i) worker.parts.push_back((first + i) % num_parts);
  while (!worker.parts.empty()) {
    size_t busy = 0;
    for (const int64_t part : worker.parts) {
      const int row = worker.touched_rows[static_cast<size_t>(part / parts_a_row_)];
      if (!FlushPart(worker, row, part % parts_a_row_, of_turn)) worker.parts[busy++] = part;
    }
    worker.parts.resize(busy);
    if (busy > 0) __builtin_ia32_pause();
  }
  for (const int row : worker.touched_rows) {
    PublishLse(row);
    int& slot = worker.slot_of[static_cast<size_t>(row)];
    worker.slots[static_cast<size_t>(slot)].is_used = false;
    slot = -1;
  }
  worker.touched_rows.clear();
}

void CpuAttention::LeaveToOthers(Worker& worker, int turn) {
  const int index = static_cast<int>(&worker - workers_.data());
  int num_left = 0;
  for (const Worker::Slot& slot : worker.slots) {
    num_left += slot.is_left.load(std::memory_order_relaxed) ? 1 : 0;
  }
  size_t num_kept = 0;
  for (const int row : worker.touched_rows) {
    int& at = worker.slot_of[static_cast<size_t>(row)];
    Worker::Slot& slot = worker.slots[static_cast<size_t>(at)];
    if (slot.has_entered) {
      // What it has left of this row before must have been merged: there is one place for it.
      const int before = worker.left_slot[static_cast<size_t>(row)];
      const bool may_leave =
          num_left < kMaxLeft &&
          !worker.slots[static_cast<size_t>(before)].is_left.load(std::memory_order_acquire);
      if (may_leave) {
        slot.is_left.store(true, std::memory_order_relaxed);
        worker.left_slot[static_cast<size_t>(row)] = at;
      }
      const RowWorkers::Exit exit =
          rows_[static_cast<size_t>(row)].workers.Leave(turn, index, may_leave);
      if (exit.leaves) {
        ++num_left;
        slot.is_used = false;
        at = -1;
        continue;
      }
      if (may_leave) slot.is_left.store(false, std::memory_order_relaxed);
      for (uint64_t taken = exit.taken; taken != 0; taken &= taken - 1) {
        AddLeft(worker, row, workers_[static_cast<size_t>(std::countr_zero(taken))]);
      }
    }
    worker.touched_rows[num_kept++] = row;
  }
  worker.touched_rows.resize(num_kept);
}

void CpuAttention::AddLeft(Worker& worker, int row, Worker& other) {
  const int v_dim = options_.geometry.v_dim;
  const int slot = other.left_slot[static_cast<size_t>(row)];
  const int64_t from = slot * int64_t{options_.num_heads};
  const int64_t to = SlotHead(worker, row);
  // Another core has them: asked for so far ahead that it need not be waited for.
  constexpr int64_t kAheadValues = 4096 / sizeof(float);
  constexpr int64_t kLineValues = 64 / sizeof(float);
  const float* const end = &other.o[static_cast<size_t>(from * v_dim)] + options_.num_heads * v_dim;
  const float* ahead = &other.o[static_cast<size_t>(from * v_dim)];
  for (int64_t i = 0; i < kAheadValues && ahead < end; i += kLineValues, ahead += kLineValues) {
    __builtin_prefetch(ahead, 0, 3);
  }
  for (int64_t i = 0; i < options_.num_heads; ++i) {
    for (int64_t d = 0; d < v_dim && ahead < end; d += kLineValues, ahead += kLineValues) {
      __builtin_prefetch(ahead, 0, 3);
    }
    const size_t mine = static_cast<size_t>(to + i);
    const size_t left = static_cast<size_t>(from + i);
    kernels::AddState(v_dim, &worker.o[mine * static_cast<size_t>(v_dim)], &worker.m[mine],
                      &worker.l[mine], &other.o[left * static_cast<size_t>(v_dim)], other.m[left],
                      other.l[left]);
  }
  other.slots[static_cast<size_t>(slot)].is_left.store(false, std::memory_order_release);
}

bool CpuAttention::FlushPart(Worker& worker, int row, int64_t of_row, int64_t of_turn) {
  Part& part = parts_[static_cast<size_t>(row * parts_a_row_ + of_row)];
  if (part.is_taken.load(std::memory_order_relaxed) ||
      part.is_taken.exchange(true, std::memory_order_acquire)) {
    return false;
  }
  const int v_dim = options_.geometry.v_dim;
  const int64_t first = of_row * heads_a_part_;
  const int64_t count = std::min(heads_a_part_, options_.num_heads - first);
  const int64_t begin = row * int64_t{options_.num_heads} + first;
  // All at once, since as a rule another core has them.
  constexpr int64_t kLineValues = 64 / sizeof(float);
  for (int64_t i = 0; i < count * v_dim; i += kLineValues) FetchToWrite(out_ + begin * v_dim + i);
  // The first partial of a turn is written as it is: what lies there is of an earlier one.
  const bool is_first = part.turn != of_turn;
  part.turn = of_turn;
  for (int64_t i = 0; i < count; ++i) {
    const size_t head = static_cast<size_t>(SlotHead(worker, row) + first + i);
    float lse = is_first ? kernels::kEmptyLse : part.lse[i].load(std::memory_order_relaxed);
    kernels::MergeState(v_dim, out_ + (begin + i) * v_dim, &lse,
                        &worker.o[head * static_cast<size_t>(v_dim)], worker.m[head],
                        worker.l[head]);
    part.lse[i].store(lse, std::memory_order_relaxed);
  }
  part.is_taken.store(false, std::memory_order_release);
  return true;
}

void CpuAttention::PublishLse(int row) {
  std::atomic<int>& wishes = rows_[static_cast<size_t>(row)].wishes;
  if (wishes.fetch_add(1, std::memory_order_acq_rel) > 0) return;
  for (int seen = 1;;) {
    for (int64_t of_row = 0; of_row < parts_a_row_; ++of_row) {
      const Part& part = parts_[static_cast<size_t>(row * parts_a_row_ + of_row)];
      const int64_t first = of_row * heads_a_part_;
      const int64_t count = std::min(heads_a_part_, options_.num_heads - first);
      float* const to = lse_ + row * int64_t{options_.num_heads} + first;
      for (int64_t i = 0; i < count; ++i) to[i] = part.lse[i].load(std::memory_order_relaxed);
    }
    if (wishes.compare_exchange_strong(seen, 0, std::memory_order_acq_rel)) return;
  }
}

}  // namespace writescope::attention
