#include "tests/support/attention_problems.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <sstream>

#include "engine/base/bf16.h"
#include "engine/base/check.h"

namespace writescope::testing_support {
namespace {

float Representable(float value, KvDtype dtype) {
  return dtype == KvDtype::kBf16 ? Bf16ToFloat(FloatToBf16(value)) : value;
}

void Put(std::byte* plane, int64_t index, float value, KvDtype dtype) {
  if (dtype == KvDtype::kBf16) {
    const uint16_t bits = FloatToBf16(value);
    std::memcpy(plane + 2 * index, &bits, sizeof(bits));
  } else {
    std::memcpy(plane + 4 * index, &value, sizeof(value));
  }
}

void CopyValuesFromKeys(AttentionProblem* problem) {
  const AttentionShape& shape = problem->shape;
  if (!shape.value_in_key) return;
  for (int t = 0; t < shape.num_tokens; ++t) {
    std::copy_n(problem->k.begin() + int64_t{t} * shape.k_dim, shape.v_dim,
                problem->v.begin() + int64_t{t} * shape.v_dim);
  }
}

}  // namespace

std::string AttentionShape::Name() const {
  std::ostringstream name;
  name << (dtype == KvDtype::kBf16 ? "bf16 " : "f32 ") << k_dim << "/" << v_dim
       << (value_in_key ? " latent" : "") << ", " << num_rows << " rows, " << num_tokens
       << " tokens";
  return name.str();
}

std::vector<AttentionShape> AttentionShapes() {
  struct Dims {
    int k_dim, v_dim;
    bool value_in_key;
  };
  std::vector<AttentionShape> shapes;
  for (const Dims& dims :
       {Dims{32, 32, false}, Dims{64, 64, false}, Dims{96, 96, false}, Dims{128, 128, false},
        Dims{192, 128, false}, Dims{64, 32, true}, Dims{576, 512, true}}) {
    for (const KvDtype dtype : {KvDtype::kBf16, KvDtype::kF32}) {
      for (const int num_rows : {1, 4, 6, 8, 16}) {
        for (const int num_tokens : {0, 1, 15, 16, 17, 63, 64, 65, 255, 1000}) {
          shapes.push_back(
              {dims.k_dim, dims.v_dim, dims.value_in_key, dtype, num_rows, num_tokens});
        }
      }
    }
  }
  // More rows than a panel of any kernel, and counts that fill no group.
  for (const int num_rows : {2, 3, 35, 67}) {
    shapes.push_back({64, 64, false, KvDtype::kBf16, num_rows, 130});
    shapes.push_back({96, 64, true, KvDtype::kBf16, num_rows, 130});
  }
#ifdef __SANITIZE_ADDRESS__
  // Each takes ten times as long there: a third of them, and not every third, which would be the
  // same lengths of all.
  size_t number = 0;
  std::erase_if(shapes,
                [&](const AttentionShape&) { return number++ * 2654435761u % 97 % 3 != 0; });
#endif
  return shapes;
}

TiledKv::TiledKv(const AttentionShape& shape, const std::vector<float>& k,
                 const std::vector<float>& v, const std::vector<int>& fills) {
  const int word_values = KvWordValues(shape.dtype);
  int64_t token = 0;
  for (const int fill : fills) {
    storage_.emplace_back(int64_t{kBlockTokens} * shape.k_dim * KvDtypeBytes(shape.dtype));
    storage_.emplace_back(
        shape.value_in_key ? 0 : int64_t{kBlockTokens} * shape.v_dim * KvDtypeBytes(shape.dtype));
    std::byte* k_plane = storage_[storage_.size() - 2].data();
    std::byte* v_plane = storage_.back().data();
    blocks_.push_back({k_plane, v_plane, fill, token});
    for (int t = 0; t < fill; ++t, ++token) {
      for (int d = 0; d < shape.k_dim; ++d) {
        Put(k_plane, KIndex(t, d, shape.k_dim, word_values), k[token * shape.k_dim + d],
            shape.dtype);
      }
      for (int d = 0; d < shape.v_dim && !shape.value_in_key; ++d) {
        Put(v_plane, VIndex(t, d, shape.v_dim, word_values), v[token * shape.v_dim + d],
            shape.dtype);
      }
    }
  }
  CHECK_EQ(token, shape.num_tokens);
}

std::vector<int> FullFills(int num_tokens) {
  std::vector<int> fills;
  for (; num_tokens > 0; num_tokens -= kBlockTokens) {
    fills.push_back(std::min(num_tokens, kBlockTokens));
  }
  return fills;
}

std::vector<int> RandomFills(int num_tokens, std::mt19937_64& rng) {
  std::vector<int> fills;
  while (num_tokens > 0) {
    // Half of the blocks are full, as in life.
    const int fill = rng() % 2 == 0 ? kBlockTokens : 1 + static_cast<int>(rng() % kBlockTokens);
    fills.push_back(std::min(num_tokens, fill));
    num_tokens -= fills.back();
  }
  return fills;
}

AttentionProblem RandomProblem(const AttentionShape& shape, double score_sigma, bool masked,
                               std::mt19937_64& rng) {
  AttentionProblem problem{.shape = shape, .k = {}, .v = {}, .q = {}, .visible = {}};
  std::normal_distribution<float> normal;
  problem.k.resize(int64_t{shape.num_tokens} * shape.k_dim);
  problem.v.resize(int64_t{shape.num_tokens} * shape.v_dim);
  for (float& value : problem.k) value = Representable(normal(rng), shape.dtype);
  for (float& value : problem.v) value = Representable(normal(rng), shape.dtype);
  CopyValuesFromKeys(&problem);
  const float q_sigma = static_cast<float>(score_sigma / std::sqrt(shape.k_dim));
  for (int i = 0; i < shape.num_rows * shape.k_dim; ++i) problem.q.push_back(normal(rng) * q_sigma);
  for (int r = 0; masked && r < shape.num_rows; ++r) {
    problem.visible.push_back(static_cast<int64_t>(rng() % (shape.num_tokens + 3)));
  }
  return problem;
}

AttentionProblem NeedleProblem(const AttentionShape& shape, std::mt19937_64& rng) {
  CHECK_LE(shape.num_tokens, 1 << 10);
  AttentionProblem problem{.shape = shape, .k = {}, .v = {}, .q = {}, .visible = {}};
  // Keys are signs: the token's number in binary, then noise. Two keys differ in at least one sign,
  // so their product is at least 2 below k_dim, and with queries of 128 times the key 256 lower.
  for (int t = 0; t < shape.num_tokens; ++t) {
    for (int d = 0; d < shape.k_dim; ++d) {
      const bool bit = d < 10 ? (t >> d) & 1 : rng() & 1;
      problem.k.push_back(bit ? 1.0f : -1.0f);
    }
    // Whole numbers that bf16 represents; the first two dims tell the tokens apart.
    for (int d = 0; d < shape.v_dim; ++d) {
      problem.v.push_back(static_cast<float>(d == 0   ? t % 251
                                             : d == 1 ? t / 251
                                                      : (t * 31 + d * 17) % 251 - 125));
    }
  }
  CopyValuesFromKeys(&problem);
  return problem;
}

void AskForNeedles(const std::vector<int>& wanted, AttentionProblem* problem) {
  CHECK_EQ(static_cast<int>(wanted.size()), problem->shape.num_rows);
  const int k_dim = problem->shape.k_dim;
  problem->q.clear();
  for (const int token : wanted) {
    for (int d = 0; d < k_dim; ++d)
      problem->q.push_back(128 * problem->k[int64_t{token} * k_dim + d]);
  }
}

void RoundQueries(AttentionProblem* problem) {
  for (float& value : problem->q) value = Representable(value, KvDtype::kBf16);
}

DenseAnswer AnswerDensely(const AttentionProblem& problem) {
  const AttentionShape& shape = problem.shape;
  DenseAnswer answer;
  for (int r = 0; r < shape.num_rows; ++r) {
    const int64_t seen = problem.visible.empty()
                             ? shape.num_tokens
                             : std::clamp<int64_t>(problem.visible[r], 0, shape.num_tokens);
    std::vector<double> weights(seen);
    double maximum = -std::numeric_limits<double>::infinity();
    for (int64_t t = 0; t < seen; ++t) {
      for (int d = 0; d < shape.k_dim; ++d) {
        weights[t] +=
            static_cast<double>(problem.q[r * shape.k_dim + d]) * problem.k[t * shape.k_dim + d];
      }
      maximum = std::max(maximum, weights[t]);
    }
    double sum = 0;
    for (double& weight : weights) sum += weight = std::exp2(weight - maximum);
    std::vector<double> out(shape.v_dim), abs_sum(shape.v_dim), square_sum(shape.v_dim);
    for (int64_t t = 0; t < seen; ++t) {
      for (int d = 0; d < shape.v_dim; ++d) {
        const double product = weights[t] / sum * problem.v[t * shape.v_dim + d];
        out[d] += product;
        abs_sum[d] += std::fabs(product);
        square_sum[d] += product * product;
      }
    }
    answer.partials.out.insert(answer.partials.out.end(), out.begin(), out.end());
    answer.partials.lse.push_back(maximum + std::log2(sum));
    answer.abs_sum.insert(answer.abs_sum.end(), abs_sum.begin(), abs_sum.end());
    answer.square_sum.insert(answer.square_sum.end(), square_sum.begin(), square_sum.end());
  }
  return answer;
}

template <typename T>
RunningStates<T>::RunningStates(int num_rows, int v_dim)
    : num_rows_(num_rows),
      v_dim_(v_dim),
      o_(static_cast<size_t>(num_rows) * v_dim, 0),
      m_(num_rows, -std::numeric_limits<T>::infinity()),
      l_(num_rows, 0) {
  for (int r = 0; r < num_rows; ++r) {
    o_rows_.push_back(&o_[static_cast<size_t>(r) * v_dim]);
    m_rows_.push_back(&m_[r]);
    l_rows_.push_back(&l_[r]);
  }
}

template <typename T>
kernels::AttentionPartialArgsT<T> RunningStates<T>::Args(
    const AttentionProblem& problem, std::span<const kernels::KvHeadBlock> blocks) {
  q_rows_.clear();
  for (int r = 0; r < num_rows_; ++r) q_rows_.push_back(&problem.q[r * problem.shape.k_dim]);
  return {.k_dim = problem.shape.k_dim,
          .v_dim = problem.shape.v_dim,
          .value_in_key = problem.shape.value_in_key,
          .dtype = problem.shape.dtype,
          .blocks = blocks,
          .num_rows = num_rows_,
          .q = q_rows_.data(),
          .visible = problem.visible.empty() ? nullptr : problem.visible.data(),
          .o = o_rows_.data(),
          .m = m_rows_.data(),
          .l = l_rows_.data()};
}

template <typename T>
Partials<T> RunningStates<T>::Finish() const {
  Partials<T> partials;
  partials.out.resize(o_.size());
  partials.lse.resize(num_rows_);
  for (int r = 0; r < num_rows_; ++r) {
    kernels::FinishPartial(v_dim_, &o_[static_cast<size_t>(r) * v_dim_], m_[r], l_[r],
                           &partials.out[static_cast<size_t>(r) * v_dim_], &partials.lse[r]);
  }
  return partials;
}

template class RunningStates<float>;
template class RunningStates<double>;

}  // namespace writescope::testing_support
