#include "tests/engine/ops/cuda_attend_rig.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <numeric>
#include <sstream>
#include <thread>

#include "absl/time/time.h"
#include "engine/base/bf16.h"
#include "engine/base/check.h"
#include "engine/base/units.h"
#include "engine/kernels/attention_partial.h"
#include "tests/support/gpu.h"

namespace writescope::ops {
namespace {

using testing_support::AttentionProblem;
using testing_support::AttentionShape;
using testing_support::DenseAnswer;
using testing_support::FullFills;
using testing_support::RunningStates;
using testing_support::TiledKv;

float Rounded(float value, KvDtype dtype) {
  return dtype == KvDtype::kBf16 ? Bf16ToFloat(FloatToBf16(value)) : value;
}

std::vector<float> RandomValues(int64_t count, float sigma, KvDtype dtype, std::mt19937_64& rng) {
  std::normal_distribution<float> normal(0, sigma);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = Rounded(normal(rng), dtype);
  return values;
}

void FillSpan(const KvGeometry& kv, SceneSpan* span, std::mt19937_64& rng) {
  span->mapped = rng() % 4 == 0;
  for (int head = 0; head < kv.num_kv_heads; ++head) {
    span->k.push_back(RandomValues(int64_t{span->num_tokens} * kv.k_dim, 1, kv.dtype, rng));
    if (!kv.value_in_key) {
      span->v.push_back(RandomValues(int64_t{span->num_tokens} * kv.v_dim, 1, kv.dtype, rng));
      continue;
    }
    std::vector<float>& v = span->v.emplace_back();
    for (int t = 0; t < span->num_tokens; ++t) {
      const auto key = span->k.back().begin() + int64_t{t} * kv.k_dim;
      v.insert(v.end(), key, key + kv.v_dim);
    }
  }
}

// Spans over positions [first, end) that `readers` read.
void AddSpans(const SceneShape& shape, int64_t first, int64_t end, const std::vector<int>& readers,
              Scene* scene, std::mt19937_64& rng) {
  while (first < end) {
    const int64_t blocks = shape.one_block_spans ? 1 : 1 + static_cast<int64_t>(rng() % 7);
    SceneSpan span;
    span.first_position = first;
    span.num_tokens = static_cast<int>(std::min(end - first, blocks * kBlockTokens));
    span.readers = readers;
    FillSpan(shape.kv, &span, rng);
    first += span.num_tokens;
    scene->spans.push_back(std::move(span));
  }
}

AttentionShape ShapeOf(const Scene& scene, int num_rows, int num_tokens) {
  return {.k_dim = scene.kv.k_dim,
          .v_dim = scene.kv.v_dim,
          .value_in_key = scene.kv.value_in_key,
          .dtype = scene.kv.dtype,
          .num_rows = num_rows,
          .num_tokens = num_tokens};
}

// One KV head of one reader; its spans cover positions from 0 on.
AttentionProblem ProblemOf(const Scene& scene, int reader, int kv_head) {
  std::vector<const SceneSpan*> spans;
  for (const SceneSpan& span : scene.spans) {
    if (std::find(span.readers.begin(), span.readers.end(), reader) != span.readers.end()) {
      spans.push_back(&span);
    }
  }
  std::sort(spans.begin(), spans.end(), [](const SceneSpan* a, const SceneSpan* b) {
    return a->first_position < b->first_position;
  });
  AttentionProblem problem;
  int num_tokens = 0;
  for (const SceneSpan* span : spans) {
    CHECK_EQ(span->first_position, num_tokens);
    num_tokens += span->num_tokens;
    problem.k.insert(problem.k.end(), span->k[kv_head].begin(), span->k[kv_head].end());
    problem.v.insert(problem.v.end(), span->v[kv_head].begin(), span->v[kv_head].end());
  }
  const ReaderRows& rows = scene.rows[reader];
  problem.shape = ShapeOf(scene, rows.num_rows * scene.group(), num_tokens);
  for (int row = 0; row < rows.num_rows; ++row) {
    const auto q = scene.q.begin() +
                   (int64_t{rows.first_row + row} * scene.num_heads + kv_head * scene.group()) *
                       scene.kv.k_dim;
    problem.q.insert(problem.q.end(), q, q + scene.group() * scene.kv.k_dim);
    for (int h = 0; h < scene.group(); ++h) {
      problem.visible.push_back(rows.first_position + row + 1);
    }
  }
  return problem;
}

void AnswerHead(const Scene& scene, int reader, int kv_head, SceneAnswer* answer) {
  const AttentionProblem problem = ProblemOf(scene, reader, kv_head);
  const AttentionShape& shape = problem.shape;
  const DenseAnswer dense = AnswerDensely(problem);
  const TiledKv kv(shape, problem.k, problem.v, FullFills(shape.num_tokens));
  RunningStates<double> states(shape.num_rows, shape.v_dim);
  kernels::AttentionPartialRef(states.Args(problem, kv.blocks()));
  const std::vector<double> out = states.Finish().out;
  const ReaderRows& rows = scene.rows[reader];
  const int64_t run = int64_t{scene.group()} * shape.v_dim;  // Of one row
  for (int row = 0; row < rows.num_rows; ++row) {
    const int64_t to =
        (int64_t{rows.first_row + row} * scene.num_heads + kv_head * scene.group()) * shape.v_dim;
    std::copy_n(out.begin() + row * run, run, answer->out.begin() + to);
    std::copy_n(dense.abs_sum.begin() + row * run, run, answer->abs_sum.begin() + to);
    std::copy_n(dense.square_sum.begin() + row * run, run, answer->square_sum.begin() + to);
  }
}

// The blocks of a span as they lie in memory.
std::vector<std::byte> BlocksOf(const Scene& scene, const SceneSpan& span) {
  const KvGeometry& kv = scene.kv;
  const int num_blocks = static_cast<int>(CeilDiv(span.num_tokens, kBlockTokens));
  std::vector<std::byte> bytes(static_cast<size_t>(num_blocks * kv.block_bytes()));
  for (int head = 0; head < kv.num_kv_heads; ++head) {
    TiledKv tiles(ShapeOf(scene, 1, span.num_tokens), span.k[head], span.v[head],
                  FullFills(span.num_tokens));
    for (int b = 0; b < num_blocks; ++b) {
      std::byte* at = bytes.data() + b * kv.block_bytes() + head * kv.head_bytes();
      std::memcpy(at, tiles.k_plane(b), static_cast<size_t>(kv.k_plane_bytes()));
      if (kv.value_in_key) continue;
      std::memcpy(at + kv.k_plane_bytes(), tiles.v_plane(b),
                  static_cast<size_t>(kv.v_plane_bytes()));
    }
  }
  return bytes;
}

}  // namespace

std::string Scene::Name() const {
  std::ostringstream name;
  name << (kv.dtype == KvDtype::kBf16 ? "bf16 " : "f32 ") << kv.k_dim << "/" << kv.v_dim
       << (kv.value_in_key ? " latent" : "") << ", " << num_heads << " heads on " << kv.num_kv_heads
       << ", " << rows.size() << " sequences, " << num_rows << " rows, " << spans.size()
       << " spans";
  return name.str();
}

Scene RandomScene(const SceneShape& shape, std::mt19937_64& rng) {
  Scene scene;
  scene.kv = shape.kv;
  scene.num_heads = shape.kv.num_kv_heads * shape.group;
  const int64_t max_shared = std::max(0, shape.max_tokens / kBlockTokens / 2);
  const int64_t shared = shape.num_sequences < 2 ? 0 : rng() % (max_shared + 1) * kBlockTokens;
  std::vector<int> sharers;
  for (int s = 0; s < shape.num_sequences; ++s) {
    const bool shares = shared > 0 && rng() % 2 == 0;
    if (shares) sharers.push_back(s);
    const int64_t most = shape.max_tokens - shared;
    const int64_t own = shape.all_as_large ? most : 1 + static_cast<int64_t>(rng() % most);
    const int64_t first = shares ? shared : 0;
    const int most_rows = static_cast<int>(std::min<int64_t>(own, shape.max_rows));
    const int num_rows = shape.all_as_large ? most_rows : 1 + static_cast<int>(rng() % most_rows);
    scene.rows.push_back({.first_row = scene.num_rows,
                          .num_rows = num_rows,
                          .first_position = first + own - num_rows});
    scene.num_rows += num_rows;
    AddSpans(shape, first, first + own, {s}, &scene, rng);
  }
  if (!sharers.empty()) AddSpans(shape, 0, shared, sharers, &scene, rng);
  std::shuffle(scene.spans.begin(), scene.spans.end(), rng);
  scene.q = RandomValues(int64_t{scene.num_rows} * scene.num_heads * shape.kv.k_dim,
                         static_cast<float>(shape.score_sigma / std::sqrt(shape.kv.k_dim)),
                         KvDtype::kBf16, rng);
  return scene;
}

SceneAnswer AnswerScene(const Scene& scene) {
  SceneAnswer answer;
  const size_t count = static_cast<size_t>(scene.num_rows) * scene.num_heads * scene.kv.v_dim;
  answer.out.resize(count);
  answer.abs_sum.resize(count);
  answer.square_sum.resize(count);
  const int num_jobs = static_cast<int>(scene.rows.size()) * scene.kv.num_kv_heads;
  std::atomic<int> next{0};
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < std::max(1u, std::thread::hardware_concurrency()); ++i) {
    threads.emplace_back([&] {
      for (int job = next++; job < num_jobs; job = next++) {
        AnswerHead(scene, job / scene.kv.num_kv_heads, job % scene.kv.num_kv_heads, &answer);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return answer;
}

double RmsError(const SceneAnswer& answer, const std::vector<float>& out) {
  double sum = 0;
  for (size_t i = 0; i < out.size(); ++i) sum += std::pow(out[i] - answer.out[i], 2);
  return std::sqrt(sum / static_cast<double>(out.size()));
}

CudaAttendRig::CudaAttendRig() {
  auto device = device::CudaDevice::Create({.budget_bytes = 8 * kGiB});
  CHECK(device.ok()) << device.status();
  device_ = *std::move(device);
}

std::unique_ptr<CudaAttend> CudaAttendRig::MakeAttend(int num_heads, int head_dim,
                                                      ComputeType compute, bool force_simt) {
  auto attend = CudaAttend::Create(*device_, {.num_heads = num_heads, .max_head_dim = head_dim},
                                   compute, force_simt);
  CHECK(attend.ok()) << attend.status();
  return *std::move(attend);
}

Uploaded CudaAttendRig::Upload(const void* from, int64_t size_bytes) {
  const int64_t taken = std::max<int64_t>(size_bytes, 64);
  Uploaded to = {.before = testing::BytesBefore(taken)};
  to.buffer = *device_->AllocateDevice(to.before + taken, "test");
  CHECK(cudaMemcpy(to.data(), from, static_cast<size_t>(size_bytes), cudaMemcpyDefault) ==
        cudaSuccess);
  return to;
}

std::vector<float> CudaAttendRig::Download(const std::byte* from, int64_t count) {
  device::CudaQueue& queue = device_->compute();
  CHECK(queue.Record().Wait(absl::Seconds(60)).ok());
  const absl::Status status = queue.TakeError();
  CHECK(status.ok()) << status;
  std::vector<float> values(static_cast<size_t>(count));
  CHECK(cudaMemcpy(values.data(), from, values.size() * sizeof(float), cudaMemcpyDefault) ==
        cudaSuccess);
  return values;
}

void CudaAttendRig::Load(const Scene& scene) {
  // In order: those in the device's memory and those in the host's.
  std::vector<std::byte> bytes[2];
  std::vector<size_t> offsets;
  for (const SceneSpan& span : scene.spans) {
    std::vector<std::byte>& to = bytes[span.mapped ? 1 : 0];
    offsets.push_back(to.size());
    const std::vector<std::byte> blocks = BlocksOf(scene, span);
    to.insert(to.end(), blocks.begin(), blocks.end());
  }
  resident_ = Upload(bytes[0].data(), static_cast<int64_t>(bytes[0].size()));
  mapped_ = *device_->AllocateHost(std::max<int64_t>(64, static_cast<int64_t>(bytes[1].size())),
                                   device::HostMemory::kPageLocked, "test");
  std::memcpy(mapped_.data(), bytes[1].data(), bytes[1].size());
  blocks_.clear();
  for (size_t i = 0; i < offsets.size(); ++i) {
    blocks_.push_back((scene.spans[i].mapped ? mapped_.data() : resident_.data()) + offsets[i]);
  }
}

CudaAttend& CudaAttendRig::AttendFor(const Scene& scene, bool force_simt) {
  const int dim = std::max(scene.kv.k_dim, scene.kv.v_dim);
  if (attend_ == nullptr || attend_heads_ != scene.num_heads || attend_dim_ != dim ||
      attend_simt_ != force_simt) {
    attend_ = MakeAttend(scene.num_heads, dim, ComputeType::kF32, force_simt);
    attend_heads_ = scene.num_heads;
    attend_dim_ = dim;
    attend_simt_ = force_simt;
  }
  return *attend_;
}

std::vector<float> CudaAttendRig::Run(const Scene& scene,
                                      const std::vector<std::vector<int>>& calls, bool force_simt) {
  const int64_t states = int64_t{scene.num_rows} * scene.num_heads;
  const int v_dim = scene.kv.v_dim;
  CudaAttend& attend = AttendFor(scene, force_simt);
  const Uploaded q = Upload(scene.q.data(), states * scene.kv.k_dim * 4);
  // What nobody wrote must not pass: everything begins as NaN.
  const std::vector<float> poison(static_cast<size_t>(states * v_dim), std::nanf(""));
  const Uploaded o = Upload(poison.data(), states * v_dim * 4);
  const Uploaded m = Upload(poison.data(), states * 4);
  const Uploaded l = Upload(poison.data(), states * 4);
  const Uploaded out = Upload(poison.data(), states * v_dim * 4);
  const AttendState state = {reinterpret_cast<float*>(o.data()), reinterpret_cast<float*>(m.data()),
                             reinterpret_cast<float*>(l.data())};
  attend.Reset(scene.num_rows, scene.num_heads, state);
  for (const std::vector<int>& call : calls) {
    std::vector<AttendSpan> spans;
    std::vector<int> readers;
    for (const int index : call) {
      const SceneSpan& span = scene.spans[index];
      spans.push_back({.base = blocks_[index],
                       .num_blocks = static_cast<int>(CeilDiv(span.num_tokens, kBlockTokens)),
                       .num_tokens = span.num_tokens,
                       .first_position = span.first_position,
                       .first_reader = static_cast<int>(readers.size()),
                       .num_readers = static_cast<int>(span.readers.size())});
      readers.insert(readers.end(), span.readers.begin(), span.readers.end());
    }
    attend.Attend({.kv = scene.kv,
                   .num_heads = scene.num_heads,
                   .q = reinterpret_cast<const float*>(q.data()),
                   .spans = spans,
                   .readers = readers,
                   .rows = scene.rows,
                   .state = state});
  }
  attend.Merge({.kv = scene.kv,
                .num_rows = scene.num_rows,
                .num_heads = scene.num_heads,
                .out_dim = v_dim,
                .state = state,
                .out = out.data()});
  return Download(out.data(), states * v_dim);
}

std::vector<float> CudaAttendRig::RunAtOnce(const Scene& scene, bool force_simt) {
  std::vector<int> all(scene.spans.size());
  std::iota(all.begin(), all.end(), 0);
  return Run(scene, {all}, force_simt);
}

}  // namespace writescope::ops
