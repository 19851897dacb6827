// Rope frequencies against values worked out apart from this code.
#include "engine/model/rope_frequencies.h"

#include <cmath>

#include "gtest/gtest.h"

namespace writescope::model {
namespace {

// DeepSeek-V2-Lite's rope.
RopeConfig V2LiteRope() {
  RopeConfig rope;
  rope.kind = RopeConfig::Kind::kYarn;
  rope.theta = 10000;
  rope.dim = 64;
  rope.interleaved = true;
  rope.factor = 40;
  rope.original_max_positions = 4096;
  rope.mscale = 0.707;
  rope.mscale_all_dim = 0.707;
  return rope;
}

void ExpectNearRelative(double got, double want) {
  // The anchors have eight digits; a float has seven.
  EXPECT_NEAR(got, want, 2e-7 * std::fabs(want));
}

TEST(RopeFrequencies, DefaultIsAPowerOfTheta) {
  RopeConfig rope;
  rope.theta = 1e6;
  rope.dim = 128;
  const std::vector<float> frequencies = InverseFrequencies(rope);
  ASSERT_EQ(frequencies.size(), 64u);
  EXPECT_EQ(frequencies[0], 1.0f);
  for (int i = 0; i < 64; ++i) ExpectNearRelative(frequencies[i], std::pow(1e6, -2.0 * i / 128));
}

TEST(RopeFrequencies, YarnAnchorsOfV2Lite) {
  const YarnRange range = YarnCorrectionRange(V2LiteRope());
  EXPECT_EQ(range.low, 10);
  EXPECT_EQ(range.high, 23);
  const std::vector<float> frequencies = InverseFrequencies(V2LiteRope());
  ASSERT_EQ(frequencies.size(), 32u);
  EXPECT_EQ(frequencies[0], 1.0f);
  ExpectNearRelative(frequencies[1], 0.74989421);
  ExpectNearRelative(frequencies[10], 0.056234133);
  ExpectNearRelative(frequencies[11], 0.039006927);
  ExpectNearRelative(frequencies[16], 0.0055);
  ExpectNearRelative(frequencies[22], 1.7782794e-4);
  ExpectNearRelative(frequencies[23], 3.3338036e-5);
  ExpectNearRelative(frequencies[31], 3.3338036e-6);
}

TEST(RopeFrequencies, YarnMscale) {
  EXPECT_NEAR(YarnMscale(40, 0.707), 1.2608037774, 1e-10);
  EXPECT_EQ(YarnMscale(1, 0.707), 1.0);
  EXPECT_EQ(YarnMscale(40, 0), 1.0);
}

TEST(RopeFrequencies, YarnAttentionFactorIsARatio) {
  EXPECT_EQ(YarnAttentionFactor(V2LiteRope()), 1.0);
  RopeConfig rope = V2LiteRope();
  rope.factor = 4;
  rope.mscale = 1;
  rope.mscale_all_dim = 0;
  EXPECT_NEAR(YarnAttentionFactor(rope), 0.1 * std::log(4.0) + 1, 1e-12);
}

TEST(RopeFrequencies, FactorOneChangesNothing) {
  RopeConfig yarn = V2LiteRope();
  yarn.factor = 1;
  RopeConfig plain = yarn;
  plain.kind = RopeConfig::Kind::kDefault;
  const std::vector<float> got = InverseFrequencies(yarn);
  const std::vector<float> want = InverseFrequencies(plain);
  for (size_t i = 0; i < want.size(); ++i) ExpectNearRelative(got[i], want[i]);
}

TEST(RopeFrequencies, EqualEndsMakeAStep) {
  RopeConfig rope = V2LiteRope();
  rope.beta_fast = rope.beta_slow = 1;
  rope.truncate_range = false;
  const YarnRange range = YarnCorrectionRange(rope);
  EXPECT_NEAR(range.low, 22.51344, 1e-5);
  EXPECT_NEAR(range.high - range.low, 0.001, 1e-9);
  const std::vector<float> frequencies = InverseFrequencies(rope);
  ExpectNearRelative(frequencies[22], std::pow(10000.0, -44.0 / 64));
  ExpectNearRelative(frequencies[23], std::pow(10000.0, -46.0 / 64) / 40);
}

TEST(SoftmaxScale, SquaredMscaleOnlyUnderMlaWithYarn) {
  ModelConfig config;
  config.mla = true;
  config.qk_nope_head_dim = 128;
  config.qk_rope_head_dim = 64;
  config.rope = V2LiteRope();
  EXPECT_NEAR(SoftmaxScale(config), 0.1147213868, 1e-8);
  config.rope.kind = RopeConfig::Kind::kDefault;
  EXPECT_NEAR(SoftmaxScale(config), 0.0721687836, 1e-8);
  config.mla = false;
  config.head_dim = 128;
  config.rope.kind = RopeConfig::Kind::kYarn;
  EXPECT_NEAR(SoftmaxScale(config), 0.0883883476, 1e-8);
}

}  // namespace
}  // namespace writescope::model
