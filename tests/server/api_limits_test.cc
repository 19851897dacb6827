// The ranges of a request are those that generation.proto states.
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "engine/base/regular_file.h"
#include "tests/server/worker_fixture.h"

namespace writescope::server {
namespace {

using grpc::StatusCode;
using ::testing::HasSubstr;

class ApiLimitsTest : public WorkerFixture {};

// The comment in front of a field of the API, in one line; nothing of a field that is not there.
std::string CommentOf(const std::string& field) {
  const absl::StatusOr<std::string> proto =
      ReadRegularFile(WRITESCOPE_PROTO_DIR "/writescope/v1/generation.proto", 1 << 20);
  EXPECT_TRUE(proto.ok()) << proto.status();
  std::string comment;
  for (const absl::string_view line : absl::StrSplit(proto.value_or(""), '\n')) {
    if (absl::StrContains(line, absl::StrCat(" ", field, " = "))) return comment;
    const absl::string_view text = absl::StripLeadingAsciiWhitespace(line);
    if (absl::StartsWith(text, "//")) {
      absl::StrAppend(&comment, text.substr(2));
    } else {
      comment.clear();
    }
  }
  return "";
}

TEST_F(ApiLimitsTest, SamplingHasTheRangesThatTheApiStates) {
  Start();
  using Sampling = v1::SamplingParams;
  struct Case {
    std::string field;
    std::string stated;   // In the API.
    std::string refusal;  // In messages.
    std::function<void(Sampling&, float)> set;
    std::vector<float> taken;
    std::vector<float> refused;
  };
  const float nan = std::nanf("");
  const auto above = [](float value) { return std::nextafter(value, 1e9f); };
  const auto below = [](float value) { return std::nextafter(value, -1e9f); };
  for (const Case& c : {
           Case{"temperature",
                "In [0, 10000].",
                "in [0, 10000]",
                [](Sampling&s, float v) { s.set_temperature(v); },
                {0, 10000},
                {below(0), above(10000), nan}},
           Case{"top_k",
                "In [0, vocab_size].",
                "in [0, 256]",
                [](Sampling&s, float v) { s.set_top_k(static_cast<uint32_t>(v)); },
                {0, 256},
                {257}},
           Case{"top_p",
                "In (0, 1].",
                "in (0, 1]",
                [](Sampling&s, float v) { s.set_top_p(v); },
                {above(0), 1},
                {0, above(1), nan}},
           Case{"min_p",
                "In [0, 1).",
                "in [0, 1)",
                [](Sampling&s, float v) { s.set_min_p(v); },
                {0, below(1)},
                {below(0), 1, nan}},
           Case{"repetition_penalty",
                "In (0, 100].",
                "in (0, 100]",
                [](Sampling&s, float v) { s.set_repetition_penalty(v); },
                {above(0), 100},
                {0, above(100), nan}},
           Case{"presence_penalty",
                "In [-2, 2].",
                "in [-2, 2]",
                [](Sampling&s, float v) { s.set_presence_penalty(v); },
                {-2, 2},
                {below(-2), above(2), nan}},
           Case{"frequency_penalty",
                "In [-2, 2].",
                "in [-2, 2]",
                [](Sampling&s, float v) { s.set_frequency_penalty(v); },
                {-2, 2},
                {below(-2), above(2), nan}},
       }) {
    EXPECT_THAT(CommentOf(c.field), HasSubstr(c.stated)) << c.field;
    for (const float value : c.taken) {
      v1::GenerateRequest request = TextRequest("x");
      c.set(*request.mutable_sampling(), value);
      EXPECT_TRUE(Generate(request).status.ok()) << c.field << " " << value;
    }
    for (const float value : c.refused) {
      v1::GenerateRequest request = TextRequest("x");
      c.set(*request.mutable_sampling(), value);
      const GenerateResult result = Generate(request);
      EXPECT_EQ(result.status.error_code(), StatusCode::INVALID_ARGUMENT)
          << c.field << " " << value;
      EXPECT_THAT(result.status.error_message(), HasSubstr(c.refusal)) << c.field;
    }
  }
}

TEST_F(ApiLimitsTest, StoppingHasTheLimitsThatTheApiStates) {
  Start();
  EXPECT_THAT(CommentOf("stop_token_ids"), HasSubstr("At most 256, each below vocab_size."));
  EXPECT_THAT(CommentOf("request_id"), HasSubstr("of at most 256 bytes; that of another request in"
                                                 " flight is ALREADY_EXISTS."));
  v1::GenerateRequest request = TextRequest("x");
  request.set_request_id(std::string(256, 'x'));
  request.mutable_stopping()->set_max_tokens(1);
  for (uint32_t id = 0; id < 256; ++id) request.mutable_stopping()->add_stop_token_ids(id);
  EXPECT_TRUE(Generate(request).status.ok());
  request.mutable_stopping()->add_stop_token_ids(0);
  EXPECT_THAT(Generate(request).status.error_message(), HasSubstr("257 ids long"));
}

}  // namespace
}  // namespace writescope::server
