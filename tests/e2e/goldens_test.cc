// The reference outputs of every family through the worker: prompt log-probabilities and greedy
// tokens over gRPC, from checkpoints that have no tokenizer.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "engine/model/safetensors.h"
#include "grpcpp/grpcpp.h"
#include "tests/e2e/harness.h"
#include "writescope/v1/generation.grpc.pb.h"

namespace writescope::e2e {
namespace {

const std::string kGoldens = WRITESCOPE_SOURCE_DIR "/tests/testdata/goldens/";
// Twice the bound on logits: a log-probability is a logit less the logarithm of a sum of them.
constexpr double kBound = 1e-3;

template <typename T>
std::vector<T> Read(const model::SafetensorsFile& file, const std::string& name) {
  const model::TensorView* tensor = file.Find(name);
  std::vector<T> values(static_cast<size_t>(tensor->num_elements()));
  std::memcpy(values.data(), tensor->bytes.data(), values.size() * sizeof(T));
  return values;
}

double LogSumExp(const float* logits, size_t count) {
  const double max = *std::max_element(logits, logits + count);
  double sum = 0;
  for (size_t i = 0; i < count; ++i) sum += std::exp(logits[i] - max);
  return max + std::log(sum);
}

class GoldensOverGrpcTest : public ::testing::TestWithParam<std::string> {};

TEST_P(GoldensOverGrpcTest, LogprobsAndGreedyTokensAreTheReferences) {
  const auto golden = model::SafetensorsFile::Open(kGoldens + GetParam() + "/golden.safetensors");
  ASSERT_TRUE(golden.ok()) << golden.status();
  const auto worker = StartWorker(
      WORKER, {"--model=" + kGoldens + GetParam(), "--vram-budget=16MiB", "--host-budget=64MiB",
               "--kv-dtype=f32", "--max-sequences=2", "--cut=planned"});
  ASSERT_TRUE(worker.ok()) << worker.status();
  const auto stub = v1::GenerationService::NewStub(
      grpc::CreateChannel(worker->generation, grpc::InsecureChannelCredentials()));
  for (const int length : {5, 16, 33, 130, 517}) {
    SCOPED_TRACE(length);
    const std::string suffix = "." + std::to_string(length);
    const auto prompt = Read<int32_t>(*golden, "prompt" + suffix);
    const auto logits = Read<float>(*golden, "logits" + suffix);
    const auto greedy = Read<int32_t>(*golden, "greedy" + suffix);
    const size_t rows = std::min<size_t>(64, prompt.size());
    const size_t vocab = logits.size() / rows;

    v1::GenerateRequest request;
    for (const int32_t id : prompt) request.mutable_token_ids()->add_ids(static_cast<uint32_t>(id));
    request.mutable_sampling()->set_temperature(0);
    request.mutable_stopping()->set_max_tokens(static_cast<uint32_t>(greedy.size()));
    request.mutable_stopping()->set_ignore_eos(true);
    request.mutable_logprobs()->set_prompt_logprobs(0);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    auto stream = stub->Generate(&context, request);
    std::vector<v1::PositionLogprobs> positions;
    std::vector<int32_t> tokens;
    for (v1::GenerateResponse message; stream->Read(&message);) {
      positions.insert(positions.end(), message.prompt_logprobs().begin(),
                       message.prompt_logprobs().end());
      for (const uint32_t id : message.token_ids()) tokens.push_back(static_cast<int32_t>(id));
    }
    const grpc::Status status = stream->Finish();
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(tokens, greedy);
    ASSERT_EQ(positions.size(), prompt.size());
    // The reference holds the last `rows` positions; each speaks of the token behind it.
    for (size_t row = 0; row + 1 < rows; ++row) {
      const size_t next = prompt.size() - rows + row + 1;
      const float* reference = &logits[row * vocab];
      const double want = reference[prompt[next]] - LogSumExp(reference, vocab);
      ASSERT_EQ(positions[next].token().token_id(), static_cast<uint32_t>(prompt[next]));
      EXPECT_NEAR(positions[next].token().logprob(), want, kBound) << "position " << next;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Families, GoldensOverGrpcTest,
                         ::testing::Values("mixtral", "qwen3_moe", "qwen3_moe_dense0",
                                           "deepseek_v2_plain", "deepseek_v2_yarn"));

}  // namespace
}  // namespace writescope::e2e
