// Twenty facts in one long prompt, asked for by twenty requests that share it, with every block of
// their KV cache outside the device.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "engine/runtime/engine.h"
#include "tests/support/collect_sink.h"
#include "tests/support/demo_engine.h"
#include "tests/support/demo_prompt.h"
#include "tests/support/test_device.h"

namespace writescope::runtime {
namespace {

using testing::CollectSink;
using testing::HarborCode;
using testing::kDemo;

constexpr int kAnswerTokens = 6;

// A budget that holds all fixed parts and no KV block.
EngineOptions AllSwing(WeightsFormat weights) {
  EngineOptions options;
  options.weights = weights;
  options.model_dir = kDemo;
  options.vram_budget_bytes = 512 << 20;
  options.host_budget_bytes = 512 << 20;
  options.ring_bytes = 4 << 20;
  options.max_sequences = 20;
  options.cut = CutMode::kPlanned;
  testing::UseTestDevice(options);
  options.vram_budget_bytes = testing::FixedDeviceBytes(options);
  return options;
}

void ExpectTwentyOfTwentyAtEveryShare(const EngineOptions& options, size_t num_tokens) {
  const std::vector<HarborCode> codes = testing::RandomHarborCodes(20, 4);
  const auto created = Engine::Create(options, nullptr);
  ASSERT_TRUE(created.ok()) << created.status();
  Engine& engine = **created;
  ASSERT_EQ(engine.plan().device_kv_tokens, 0);
  // Plants lie in the first nine tenths, so that the end can be cut to the exact length.
  const std::string prose = testing::ReadText(kDemo + "/prose.txt");
  const std::string text = testing::PlantedProse(prose, num_tokens * 4, codes);
  auto prefix = engine.Tokenize({{.text = text}}, std::nullopt);
  ASSERT_TRUE(prefix.ok()) << prefix.status();
  int64_t generation = 0;
  for (const double share : {0.0, 0.5, 1.0}) {
    SCOPED_TRACE("share " + std::to_string(share));
    ASSERT_TRUE(engine
                    .SetCpuShare({.controller_id = "test",
                                  .generation = ++generation,
                                  .table = roofline::ConstantTable(share),
                                  .valid_for = absl::Hours(1)})
                    .ok());
    std::vector<std::shared_ptr<CollectSink>> sinks;
    for (const HarborCode& code : codes) {
      GenerateRequest request;
      request.prompt = testing::AskForCode(engine, *prefix, num_tokens - kAnswerTokens, code.city);
      request.sampling.temperature = 0;
      request.stopping.max_tokens = kAnswerTokens;
      sinks.push_back(std::make_shared<CollectSink>());
      const auto id = engine.Submit(std::move(request), sinks.back());
      ASSERT_TRUE(id.ok()) << id.status();
    }
    for (size_t i = 0; i < sinks.size(); ++i) {
      ASSERT_TRUE(sinks[i]->Await(absl::Minutes(20)));
      ASSERT_TRUE(sinks[i]->status().ok()) << sinks[i]->status();
      EXPECT_EQ(sinks[i]->text().substr(0, 5), codes[i].code) << codes[i].city;
      const PlacementReport placement = *sinks[i]->last().placement;
      EXPECT_EQ(share == 0, placement.cpu_tokens == 0);
      EXPECT_EQ(share == 1, placement.gpu_streamed_tokens == 0);
    }
  }
  EXPECT_EQ(engine.state().moved_bytes_total, 0);
}

class RecallTest : public ::testing::TestWithParam<int> {};

TEST_P(RecallTest, TwentyOfTwentyAtEveryShare) {
  ExpectTwentyOfTwentyAtEveryShare(AllSwing(WeightsFormat::kSource),
                                   static_cast<size_t>(GetParam()));
}

TEST(RecallInt4Test, TwentyOfTwentyAtEveryShare) {
  if (testing::OnCuda() && !testing::ComputesInBf16()) GTEST_SKIP() << "int4 needs bf16 on CUDA";
  ExpectTwentyOfTwentyAtEveryShare(AllSwing(WeightsFormat::kInt4), WRITESCOPE_RECALL_TOKENS);
}

INSTANTIATE_TEST_SUITE_P(Tokens, RecallTest,
                         ::testing::Values(WRITESCOPE_RECALL_TOKENS, 16384, 32640),
                         ::testing::PrintToStringParamName());

}  // namespace
}  // namespace writescope::runtime
