// A step whose other side dies fails in time with a status, and the next one gives the tokens that
// it would have given: on either device.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <string>
#include <vector>

#include "engine/device/device.h"
#include "tests/support/test_device.h"
#include "tests/support/tiny_model.h"
#include "tests/support/tries.h"

namespace writescope {
namespace {

using attention::Side;
using testing::Driver;
using testing::TinyModel;

const std::string kModel = WRITESCOPE_TESTDATA_DIR "/goldens/qwen3_moe";
constexpr attention::SharePlan kHalf{.meet = false, .cpu_share = 0.5, .handoff = true};
constexpr absl::Duration kWaitLimit = absl::Milliseconds(500);

std::vector<TokenId> Prompt() {
  std::vector<TokenId> tokens;
  for (int i = 0; i < 300; ++i) tokens.push_back((i * 37 + 11) % 128);
  return tokens;
}

std::unique_ptr<TinyModel> Load(absl::Duration wait_limit) {
  auto tiny = TinyModel::Load({.dir = kModel, .blocks = {0, 0, 16, 0}, .wait_limit = wait_limit});
  EXPECT_TRUE(tiny.ok()) << tiny.status();
  return tiny.ok() ? *std::move(tiny) : nullptr;
}

class FailedStepTest : public ::testing::TestWithParam<Side> {};

TEST_P(FailedStepTest, EndsInTimeAndTheNextStepIsAsIfItHadNotBeen) {
  auto whole = Load(absl::Seconds(10));
  auto failing = Load(kWaitLimit);
  Driver expected(*whole), driver(*failing);
  ASSERT_TRUE(expected.Feed(Prompt(), 2048, false, kHalf).ok());
  const auto fed = testing::WithTries([&] { return driver.Feed(Prompt(), 2048, false, kHalf); });
  ASSERT_TRUE(fed.ok()) << fed.status();
  for (const int dead_from_turn : {0, 1}) {
    std::atomic<int> asked{0};
    failing->runner->attention().SetClaimHook([&](Side side, int turn) {
      if (side != GetParam() || turn < dead_from_turn) return true;
      ++asked;
      return false;
    });
    const double began_s = device::NowSeconds();
    const auto failed = driver.Feed({5}, 1, true, kHalf);
    EXPECT_FALSE(failed.ok());
    EXPECT_LT(device::NowSeconds() - began_s, 10 * absl::ToDoubleSeconds(kWaitLimit));
    EXPECT_GT(asked.load(), 0);
    ASSERT_TRUE(failing->runner->Ok());
    failing->runner->attention().SetClaimHook(nullptr);
    const auto want = expected.Feed({5}, 1, true, kHalf);
    const auto got = testing::WithTries([&] { return driver.Feed({5}, 1, true, kHalf); });
    ASSERT_TRUE(want.ok() && got.ok()) << got.status();
    for (size_t i = 0; i < want->back().size(); ++i) {
      ASSERT_NEAR(got->back()[i], want->back()[i], testing::ComputesInBf16() ? 0.1 : 1e-4) << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sides, FailedStepTest, ::testing::Values(Side::kCpu, Side::kLink),
                         [](const auto& test) {
                           return test.param == Side::kCpu ? "Cpu" : "Link";
                         });

}  // namespace
}  // namespace writescope
