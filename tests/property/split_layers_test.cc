// The exact layers of "any split equals no split": the split itself in double, to rounding; and the
// needle, where one token is everything, bit for bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <tuple>

#include "engine/kernels/attention_partial.h"
#include "tests/support/attention_scenes.h"
#include "tests/support/seed.h"

namespace writescope {
namespace {

using attention::Run;
using attention::StepAttention;
using kernels::KvHeadBlock;
using testing::AddBatch;
using testing::AttentionRig;
using testing::DecodeRequest;
using testing::Mix;
using testing::PlacementCase;
using testing::Shape;
using testing::StepOutput;
using testing::StepRequest;
using testing_support::TestSeed;

using Param = std::tuple<Shape, PlacementCase>;
std::string CaseName(const ::testing::TestParamInfo<Param>& info) {
  return std::get<0>(info.param).name + std::get<1>(info.param).name;
}

// The blocks of a step that one reader sees, in a layer, for one KV head.
class ReaderBlocks {
 public:
  ReaderBlocks(AttentionRig& rig, const StepAttention& step, int layer, int kv_head, int reader)
      : rig_(rig), step_(step), layer_(layer), kv_head_(kv_head), reader_(reader) {}

  std::vector<KvHeadBlock> OfRuns(const std::vector<Run>& runs) const {
    std::vector<KvHeadBlock> blocks;
    for (const Run& run : runs) {
      const auto readers =
          std::span(step_.runs.readers)
              .subspan(static_cast<size_t>(run.first_reader), static_cast<size_t>(run.num_readers));
      if (std::find(readers.begin(), readers.end(), reader_) == readers.end()) continue;
      for (int i = 0; i < run.num_blocks; ++i) {
        blocks.push_back(
            Block(rig_.cache().blocks().region(run.region).Address(layer_, run.first_index + i),
                  kBlockTokens, run.first_position + int64_t{i} * kBlockTokens));
      }
    }
    return blocks;
  }
  std::vector<KvHeadBlock> OfSlice(const attention::RunQueue& queue, int64_t first,
                                   int64_t count) const {
    std::vector<Run> parts;
    queue.Slice(first, count, &parts);
    return OfRuns(parts);
  }
  // Tails without the token that the step would write: it has not been.
  std::vector<KvHeadBlock> OfTails() const {
    std::vector<KvHeadBlock> blocks;
    for (const StepAttention::Open& open : step_.open) {
      if (open.reader != reader_) continue;
      blocks.push_back(
          Block(open.span.address.At(layer_), open.span.num_tokens, open.span.first_position));
    }
    if (!blocks.empty()) --blocks.back().num_tokens;
    return blocks;
  }

 private:
  KvHeadBlock Block(const std::byte* block, int num_tokens, int64_t first_position) const {
    const KvGeometry& kv = rig_.options().cache.geometry;
    const std::byte* k = block + kv_head_ * kv.head_bytes();
    return {.k = k,
            .v = k + kv.k_plane_bytes(),
            .num_tokens = num_tokens,
            .first_position = first_position};
  }
  AttentionRig& rig_;
  const StepAttention& step_;
  const int layer_, kv_head_, reader_;
};

struct Partial {
  std::vector<double> out;
  double lse;
};
Partial AttendDouble(const KvGeometry& kv, const std::vector<KvHeadBlock>& blocks,
                     const std::vector<float>& q) {
  std::vector<double> o(static_cast<size_t>(kv.v_dim), 0);
  double m = kernels::kEmptyLse;
  double l = 0;
  const float* q_row = q.data();
  double* o_row = o.data();
  double* m_row = &m;
  double* l_row = &l;
  kernels::AttentionPartialRef({.k_dim = kv.k_dim,
                                .v_dim = kv.v_dim,
                                .value_in_key = kv.value_in_key,
                                .dtype = kv.dtype,
                                .blocks = blocks,
                                .num_rows = 1,
                                .q = &q_row,
                                .o = &o_row,
                                .m = &m_row,
                                .l = &l_row});
  Partial partial{.out = o, .lse = 0};
  kernels::FinishPartial(kv.v_dim, o.data(), m, l, partial.out.data(), &partial.lse);
  return partial;
}

class DoubleSplitTest : public ::testing::TestWithParam<Param> {};

TEST_P(DoubleSplitTest, EveryCutIsExact) {
  AttentionRig rig(testing::RigOptions(std::get<0>(GetParam()), std::get<1>(GetParam())));
  const KvGeometry& kv = rig.options().cache.geometry;
  const std::vector<int> slots = AddBatch(rig, 192, {386, 230, 300}, TestSeed());
  // The step's list, through a step that is given up.
  StepRequest request = DecodeRequest(slots, {.handoff = false});
  StepAttention step;
  request.plant = [&](StepAttention& made) { step = made; };
  ASSERT_TRUE(rig.Run(request).status.ok());
  // A step that is given up leaves its token in the tail, beyond the end.
  std::mt19937_64 random(TestSeed());
  const auto source = testing::RandomQueries(TestSeed(), kv.k_dim, 3.0);
  std::vector<float> q(static_cast<size_t>(kv.k_dim));
  for (int reader = 0; reader < static_cast<int>(slots.size()); ++reader) {
    for (int layer = 0; layer < rig.options().cache.num_layers; ++layer) {
      for (int kv_head = 0; kv_head < kv.num_kv_heads; ++kv_head) {
        source(layer, reader, 0, kv_head, q);
        const ReaderBlocks blocks(rig, step, layer, kv_head, reader);
        const attention::RunList& runs = step.runs;
        const int64_t swing = runs.swing.num_blocks();
        std::vector<KvHeadBlock> all;
        const std::vector<std::vector<KvHeadBlock>> fixed = {
            blocks.OfRuns(runs.device), blocks.OfTails(), blocks.OfRuns(runs.stream.runs()),
            blocks.OfRuns(runs.host.runs())};
        for (const auto& part : fixed) all.insert(all.end(), part.begin(), part.end());
        for (const KvHeadBlock& block : blocks.OfSlice(runs.swing, 0, swing)) all.push_back(block);
        const Partial whole = AttendDouble(kv, all, q);
        const testing::PlainOutput plain =
            testing::AttendPlain(rig.Head(slots[static_cast<size_t>(reader)], layer, kv_head),
                                 rig.cache().cache().length(slots[static_cast<size_t>(reader)]), q);
        for (size_t d = 0; d < whole.out.size(); ++d) {
          ASSERT_NEAR(whole.out[d], plain.out[d], 1e-12);
        }
        for (int64_t cut = 0; cut <= swing; ++cut) {
          std::vector<Partial> partials;
          for (const auto& part : fixed) partials.push_back(AttendDouble(kv, part, q));
          // Each side takes its part of the list in claims of any size.
          for (const auto& [begin, end] : {std::pair(int64_t{0}, cut), std::pair(cut, swing)}) {
            for (int64_t first = begin; first < end;) {
              const int64_t count =
                  std::min<int64_t>(end - first, 1 + static_cast<int64_t>(random() % 3));
              partials.push_back(AttendDouble(kv, blocks.OfSlice(runs.swing, first, count), q));
              first += count;
            }
          }
          std::shuffle(partials.begin(), partials.end(), random);
          Partial merged{.out = std::vector<double>(static_cast<size_t>(kv.v_dim), 0),
                         .lse = kernels::kEmptyLse};
          for (const Partial& partial : partials) {
            kernels::MergePartial(kv.v_dim, merged.out.data(), &merged.lse, partial.out.data(),
                                  partial.lse);
          }
          ASSERT_NEAR(merged.lse, whole.lse, 1e-12);
          for (size_t d = 0; d < merged.out.size(); ++d) {
            ASSERT_NEAR(merged.out[d], whole.out[d], 1e-12) << "cut " << cut;
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, DoubleSplitTest,
                         ::testing::Combine(::testing::ValuesIn(testing::AllShapes()),
                                            ::testing::ValuesIn(testing::AllPlacements())),
                         CaseName);

// Flat to peaked logits: within the bounds that hold for an engine which rounds probabilities to
// bf16, within those of float, and no worse split than whole.
class RandomSplitTest : public ::testing::TestWithParam<Param> {};

TEST_P(RandomSplitTest, NoWorseThanWithoutASplit) {
  for (const double sigma : {0.3, 1.0, 3.0, 8.0}) {
    AttentionRig rig(testing::RigOptions(std::get<0>(GetParam()), std::get<1>(GetParam())));
    rig.SetQueries(testing::RandomQueries(TestSeed(), rig.k_dim(), sigma));
    const std::vector<int> slots = AddBatch(rig, 128, {700, 500, 333}, TestSeed());
    const StepRequest whole = DecodeRequest(slots, {.handoff = false});
    const std::vector<testing::PlainOutput> plain = rig.Plain(whole);
    const auto rms = [&](const StepOutput& output) {
      double sum = 0;
      for (size_t i = 0; i < output.out.size(); ++i) {
        const testing::PlainOutput& want = plain[i / static_cast<size_t>(rig.v_dim())];
        const int d = static_cast<int>(i % static_cast<size_t>(rig.v_dim()));
        const double error = output.out[i] - want.out[static_cast<size_t>(d)];
        EXPECT_LE(std::fabs(error), testing::Bf16Bound(want, d));
        if (sigma < 1) {
          EXPECT_LE(std::fabs(error), testing::Bf16SixSigma(want, d));
        }
        EXPECT_LE(std::fabs(error), want.tolerance);
        sum += error * error;
      }
      return std::sqrt(sum / static_cast<double>(output.out.size()));
    };
    const double whole_rms = rms(rig.Run(whole));
    for (const attention::SharePlan& share :
         {attention::SharePlan{.cpu_share = 0.5, .handoff = true},
          attention::SharePlan{.cpu_share = 1, .handoff = true},
          attention::SharePlan{.meet = true, .handoff = true}}) {
      // Merging two partials rounds twice more: 2^-24 each, of values of the size of the output's.
      EXPECT_LE(rms(rig.Run(DecodeRequest(slots, share))), 1.2 * whole_rms + 0x1p-24)
          << "sigma " << sigma << ", share " << share.cpu_share;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, RandomSplitTest,
                         ::testing::Combine(::testing::ValuesIn(testing::AllShapes()),
                                            ::testing::Values(testing::AllPlacements()[0],
                                                              testing::AllPlacements()[1])),
                         CaseName);

// Keys are signs, each token's its own; a query of a hundred times a token's key gives that token
// all of the weight, and every other one a weight of 2^-150 or less, which is no float at all. So
// the answer is that token's value in every bit, whoever computes it and however it is merged.
class NeedleTest : public ::testing::TestWithParam<Param> {
 protected:
  static constexpr float kScale = 100;
  static float Sign(int layer, int kv_head, int64_t position, int d) {
    uint64_t at = Mix(Mix(17, static_cast<uint64_t>(layer)), static_cast<uint64_t>(kv_head));
    at = Mix(Mix(at, static_cast<uint64_t>(position)), static_cast<uint64_t>(d) / 32);
    return (at >> (d % 32)) % 2 == 0 ? 1.0f : -1.0f;
  }
  // Seven bits: exact in bf16; all dims together name the token.
  static float ValueOf(int layer, int kv_head, int64_t position, int d) {
    const uint64_t at =
        Mix(Mix(static_cast<uint64_t>(layer * 16 + kv_head), static_cast<uint64_t>(position)),
            static_cast<uint64_t>(d));
    return static_cast<float>(1 + at % 127);
  }

  attention::RunList runs_;
};

TEST_P(NeedleTest, EveryTokenIsFoundInEveryBit) {
  const Shape& shape = std::get<0>(GetParam());
  AttentionRig rig(testing::RigOptions(shape, std::get<1>(GetParam())));
  const KvGeometry& kv = shape.geometry;
  rig.SetKv([](int layer, int kv_head, int64_t position, TokenId, std::span<float> k,
               std::span<float> v) {
    for (size_t d = 0; d < k.size(); ++d) {
      k[d] = Sign(layer, kv_head, position, static_cast<int>(d));
    }
    for (size_t d = 0; d < v.size(); ++d) {
      v[d] = ValueOf(layer, kv_head, position, static_cast<int>(d));
    }
  });
  const std::vector<int> slots = AddBatch(rig, 128, {330, 200}, TestSeed());
  const int group = shape.num_heads / kv.num_kv_heads;
  // Needle of (layer, reader, head): all tokens in turn.
  int64_t round = 0;
  std::vector<int64_t> lengths;
  for (const int slot : slots) lengths.push_back(rig.cache().cache().length(slot) + 1);
  const auto needle = [&](int layer, int reader, int head) {
    return (round * shape.num_heads + head + 3 * layer) % lengths[static_cast<size_t>(reader)];
  };
  rig.SetQueries([&](int layer, int reader, int64_t, int head, std::span<float> q) {
    for (size_t d = 0; d < q.size(); ++d) {
      q[d] = kScale * Sign(layer, head / group, needle(layer, reader, head), static_cast<int>(d));
    }
  });
  const int64_t rounds = 331 / shape.num_heads + 1;
  int64_t swing = 0;
  for (round = 0; round < rounds; ++round) {
    for (int64_t cut = -1; cut <= swing; ++cut) {
      // Every cut at some tokens, and every token at some cuts; meet always.
      if (cut >= 0 && (cut + round) % 3 != 0) continue;
      StepRequest request = DecodeRequest(slots, {.meet = cut < 0, .handoff = true});
      request.plant = [&](StepAttention& step) { swing = step.runs.swing.num_blocks(); };
      if (cut >= 0) request.share.cpu_share = testing::ShareForCut(runs_, cut);
      const StepOutput output = rig.Run(request);
      ASSERT_TRUE(output.status.ok()) << output.status;
      runs_ = output.attention.runs;
      const float* got = output.out.data();
      for (int layer = 0; layer < rig.options().cache.num_layers; ++layer) {
        for (int reader = 0; reader < static_cast<int>(slots.size()); ++reader) {
          for (int head = 0; head < shape.num_heads; ++head) {
            const int64_t token = needle(layer, reader, head);
            for (int d = 0; d < kv.v_dim; ++d) {
              const float want = kv.value_in_key ? Sign(layer, head / group, token, d)
                                                 : ValueOf(layer, head / group, token, d);
              ASSERT_EQ(*got++, want)
                  << "token " << token << ", layer " << layer << ", reader " << reader << ", head "
                  << head << ", dim " << d << ", cut " << cut;
            }
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, NeedleTest,
                         ::testing::Combine(::testing::ValuesIn(testing::AllShapes()),
                                            ::testing::ValuesIn(testing::AllPlacements())),
                         CaseName);

}  // namespace
}  // namespace writescope
