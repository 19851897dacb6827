// Rates of the CPU kernels on one core. Attention over keys and values far larger than the caches
// is compared with plainly reading the same bytes, in the same run; everything else reports FLOP/s.
//
//   bench_cpu_kernels                        all sizes
//   bench_cpu_kernels --benchmark_filter=Tiny   the sizes that run as a test
#include <benchmark/benchmark.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "engine/base/bf16.h"
#include "engine/kernels/attention_partial.h"
#include "engine/kernels/gemm.h"

namespace writescope::kernels {
namespace {

// Memory on huge pages, as the regions of the cache are: with small pages reads are a third slower.
class Memory {
 public:
  explicit Memory(int64_t size_bytes) : size_(static_cast<size_t>(size_bytes)) {
    data_ = static_cast<std::byte*>(
        mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    madvise(data_, size_, MADV_HUGEPAGE);
    std::mt19937 rng(1);
    std::normal_distribution<float> normal;
    std::vector<uint16_t> pattern(1 << 15);
    for (uint16_t& value : pattern) value = FloatToBf16(normal(rng));
    for (size_t at = 0; at < size_; at += pattern.size() * 2) {
      std::memcpy(data_ + at, pattern.data(), std::min(size_ - at, pattern.size() * 2));
    }
  }
  ~Memory() { munmap(data_, size_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  std::byte* data() const { return data_; }
  int64_t size() const { return static_cast<int64_t>(size_); }

 private:
  size_t size_;
  std::byte* data_;
};

// Reads every byte once; the sum keeps the reads alive.
uint64_t ReadAll(const Memory& memory) {
  const auto* words = reinterpret_cast<const uint64_t*>(memory.data());
  uint64_t sums[16] = {};
  for (int64_t i = 0; i + 16 <= memory.size() / 8; i += 16) {
    for (int j = 0; j < 16; ++j) sums[j] += words[i + j];
  }
  uint64_t sum = 0;
  for (const uint64_t value : sums) sum += value;
  return sum;
}

struct AttentionCase {
  const char* name;
  int k_dim, v_dim;
  bool value_in_key;
  KvDtype dtype;
  int num_rows;
  int64_t kv_bytes;
};

// One KV head, `num_rows` rows, states of their own.
class AttentionBench {
 public:
  explicit AttentionBench(const AttentionCase& c) : c_(c), memory_(c.kv_bytes) {
    const int64_t k_bytes = int64_t{kBlockTokens} * c.k_dim * KvDtypeBytes(c.dtype);
    const int64_t v_bytes =
        c.value_in_key ? 0 : int64_t{kBlockTokens} * c.v_dim * KvDtypeBytes(c.dtype);
    for (int64_t at = 0; at + k_bytes + v_bytes <= memory_.size(); at += k_bytes + v_bytes) {
      blocks_.push_back({memory_.data() + at, memory_.data() + at + k_bytes, kBlockTokens,
                         static_cast<int64_t>(blocks_.size()) * kBlockTokens});
    }
    std::mt19937 rng(2);
    std::normal_distribution<float> normal(0, 1.0f / std::sqrt(static_cast<float>(c.k_dim)));
    q_.resize(c.num_rows * c.k_dim);
    for (float& value : q_) value = normal(rng);
    o_.resize(c.num_rows * c.v_dim);
    m_.assign(c.num_rows, kEmptyLse);
    l_.resize(c.num_rows);
    for (int r = 0; r < c.num_rows; ++r) {
      q_rows_.push_back(&q_[r * c.k_dim]);
      o_rows_.push_back(&o_[r * c.v_dim]);
      m_rows_.push_back(&m_[r]);
      l_rows_.push_back(&l_[r]);
    }
  }

  AttentionPartialArgs Args() const {
    return {.k_dim = c_.k_dim,
            .v_dim = c_.v_dim,
            .value_in_key = c_.value_in_key,
            .dtype = c_.dtype,
            .blocks = blocks_,
            .num_rows = c_.num_rows,
            .q = q_rows_.data(),
            .visible = nullptr,
            .o = o_rows_.data(),
            .m = m_rows_.data(),
            .l = l_rows_.data()};
  }
  const Memory& memory() const { return memory_; }
  double flops() const {
    return 2.0 * static_cast<double>(blocks_.size()) * kBlockTokens * c_.num_rows *
           (c_.k_dim + c_.v_dim);
  }

 private:
  AttentionCase c_;
  Memory memory_;
  std::vector<KvHeadBlock> blocks_;
  std::vector<float> q_, o_, m_, l_;
  std::vector<const float*> q_rows_;
  std::vector<float*> o_rows_, m_rows_, l_rows_;
};

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

template <typename Work>
double Seconds(const Work& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Reading and attending alternate, so that both meet the same clock and the same neighbours.
void AttendAgainstRead(benchmark::State& state, const AttentionVariant& variant,
                       const AttentionCase& c) {
  const AttentionBench bench(c);
  const auto read = [&] { benchmark::DoNotOptimize(ReadAll(bench.memory())); };
  const auto attend = [&] { variant.run(bench.Args()); };
  read();
  attend();
  std::vector<double> read_s, attend_s;
  bool read_first = true;
  for (auto _ : state) {
    if (read_first) read_s.push_back(Seconds(read));
    attend_s.push_back(Seconds(attend));
    if (!read_first) read_s.push_back(Seconds(read));
    read_first = !read_first;
    state.SetIterationTime(attend_s.back());
  }
  const double bytes = static_cast<double>(bench.memory().size());
  state.counters["GB_per_s"] = bytes / Median(attend_s) / 1e9;
  state.counters["read_GB_per_s"] = bytes / Median(read_s) / 1e9;
  state.counters["of_read"] = Median(read_s) / Median(attend_s);
  state.counters["GFLOP_per_s"] = bench.flops() / Median(attend_s) / 1e9;
}

struct GemmCase {
  int64_t num_rows, k;
  GemmWeights type;
};

// One panel of 128 rows of W.
void Gemm(benchmark::State& state, const GemmCase& c) {
  const Memory w(kGemmPanelRows * GemmRowBytes(c.type, c.k));
  const std::vector<float> x(c.num_rows * c.k, 0.5f);
  std::vector<float> y(c.num_rows * kGemmPanelRows), scratch(kGemmScratchFloats);
  for (auto _ : state) {
    GemmPanel({.num_rows = c.num_rows,
               .n = kGemmPanelRows,
               .k = c.k,
               .x = x.data(),
               .x_stride = c.k,
               .w = w.data(),
               .type = c.type,
               .y = y.data(),
               .y_stride = kGemmPanelRows,
               .accumulate = false},
              scratch.data());
    benchmark::DoNotOptimize(y.data());
  }
  state.counters["FLOP"] = benchmark::Counter(
      2.0 * static_cast<double>(c.num_rows * kGemmPanelRows * c.k),
      benchmark::Counter::kIsIterationInvariantRate, benchmark::Counter::kIs1000);
}

void Register() {
  constexpr int64_t kFar = int64_t{256} << 20;  // Beyond any cache.
  constexpr int64_t kNear = int64_t{256} << 10;
  constexpr KvDtype kBf16 = KvDtype::kBf16, kF32 = KvDtype::kF32;
  const AttentionCase cases[] = {
      {"Decode/far/group4", 128, 128, false, kBf16, 4, kFar},
      {"Decode/far/group8", 128, 128, false, kBf16, 8, kFar},
      {"Decode/far/group4_f32", 128, 128, false, kF32, 4, kFar},
      {"Decode/far/latent16", 576, 512, true, kBf16, 16, kFar},
      {"Decode/near/group4", 128, 128, false, kBf16, 4, kNear},
      {"Decode/near/group8", 128, 128, false, kBf16, 8, kNear},
      {"Prefill/dim32", 32, 32, false, kBf16, 128, kNear},
      {"Prefill/dim64", 64, 64, false, kBf16, 128, kNear},
      {"Prefill/dim128", 128, 128, false, kBf16, 128, kNear},
      {"Prefill/latent", 576, 512, true, kBf16, 128, kNear},
      {"Tiny/group4", 32, 32, false, kBf16, 4, 64 << 10},
      {"Tiny/latent", 64, 32, true, kF32, 3, 64 << 10},
  };
  for (const AttentionVariant& variant : AttentionVariants()) {
    if (variant.isa > DetectedCpuIsa()) continue;
    for (const AttentionCase& c : cases) {
      const std::string name = std::string("Attention/") + c.name + "/" + std::string(variant.name);
      // Ratios of fewer than 30 pairs stray by several percent.
      const bool is_tiny = std::strncmp(c.name, "Tiny", 4) == 0;
      benchmark::RegisterBenchmark(name.c_str(), AttendAgainstRead, variant, c)
          ->UseManualTime()
          ->Iterations(is_tiny              ? 3
                       : c.kv_bytes == kFar ? 31
                                            : 301)
          ->Unit(benchmark::kMicrosecond);
    }
  }
  for (const int64_t num_rows : {1, 4, 8, 9, 16, 32, 64, 256}) {
    for (const auto& [type, type_name] : {std::pair{GemmWeights::kBf16, "bf16/"},
                                          {GemmWeights::kF32, "f32/"},
                                          {GemmWeights::kInt4, "int4/"}}) {
      const std::string name = std::string("Gemm/") + type_name + std::to_string(num_rows);
      benchmark::RegisterBenchmark(name.c_str(), Gemm, GemmCase{num_rows, 2048, type});
    }
  }
  benchmark::RegisterBenchmark("Gemm/Tiny", Gemm, GemmCase{9, 64, GemmWeights::kBf16})
      ->Iterations(3);
}

}  // namespace
}  // namespace writescope::kernels

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  writescope::kernels::Register();
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
