#include <functional>
#include <map>
#include <string>
#include <variant>

#include "engine/base/utf8.h"
#include "tests/server/worker_fixture.h"

namespace writescope::server {
namespace {

using grpc::StatusCode;
using ::testing::HasSubstr;

class GenerationServiceTest : public WorkerFixture {};

TEST_F(GenerationServiceTest, StreamsAnAnswer) {
  Start();
  v1::GenerateRequest request = TextRequest("hello", "r1");
  request.mutable_stopping()->set_max_tokens(6);
  const GenerateResult result = Generate(request);
  ASSERT_TRUE(result.status.ok()) << result.status.error_message();
  EXPECT_EQ(result.text, "the sky is blue. the sky ");
  ASSERT_EQ(result.messages.size(), 9u);
  for (const v1::GenerateResponse& message : result.messages) {
    EXPECT_EQ(message.request_id(), "r1");
    EXPECT_EQ(message.usage().prompt_tokens(), 5u);
  }
  EXPECT_EQ(result.messages[0].progress().tokens_total(), 5u);
  EXPECT_FALSE(result.messages[5].has_finish());
  const v1::GenerateResponse& last = result.messages.back();
  EXPECT_EQ(last.finish().reason(), v1::FINISH_REASON_MAX_TOKENS);
  EXPECT_EQ(last.usage().generated_tokens(), 6u);
  EXPECT_EQ(last.placement().cpu_tokens(), 30u);
}

TEST_F(GenerationServiceTest, ChoosesAnIdWhereThereIsNone) {
  Start();
  const GenerateResult a = Generate(TextRequest("x"));
  const GenerateResult b = Generate(TextRequest("x"));
  ASSERT_TRUE(a.status.ok() && b.status.ok());
  EXPECT_THAT(a.messages[0].request_id(), HasSubstr("ws-"));
  EXPECT_NE(a.messages[0].request_id(), b.messages[0].request_id());
}

TEST_F(GenerationServiceTest, RequestReachesTheEngineWhole) {
  Start();
  v1::GenerateRequest request;
  auto* segment = request.mutable_segmented()->add_segments();
  segment->set_text("<|im_start|>");
  segment->set_allow_special(true);
  request.mutable_segmented()->add_segments()->set_text("<|im_start|> of a user");
  request.set_add_bos(false);
  request.mutable_sampling()->set_temperature(0.5);
  request.mutable_sampling()->set_top_k(40);
  request.mutable_sampling()->set_top_p(0.25);
  request.mutable_sampling()->set_min_p(0.125);
  request.mutable_sampling()->set_seed(uint64_t{1} << 63);
  request.mutable_sampling()->set_repetition_penalty(1.5);
  request.mutable_sampling()->set_presence_penalty(-0.5);
  request.mutable_sampling()->set_frequency_penalty(0.75);
  request.mutable_stopping()->set_max_tokens(2);
  request.mutable_stopping()->set_min_tokens(1);
  request.mutable_stopping()->add_stop("\nUser:");
  request.mutable_stopping()->add_stop_token_ids(7);
  request.mutable_stopping()->set_ignore_eos(true);
  request.mutable_logprobs()->set_logprobs(3);
  request.mutable_logprobs()->set_prompt_logprobs(2);
  request.set_keep_special_tokens(true);
  ASSERT_TRUE(Generate(request).status.ok());
  const runtime::GenerateRequest seen = engine_->last_request().value();
  const auto& segments = std::get<std::vector<runtime::PromptSegment>>(seen.prompt);
  ASSERT_EQ(segments.size(), 2u);
  EXPECT_TRUE(segments[0].allow_special);
  EXPECT_FALSE(segments[1].allow_special);
  EXPECT_EQ(segments[1].text, "<|im_start|> of a user");
  EXPECT_EQ(seen.add_bos, false);
  EXPECT_EQ(seen.sampling.temperature, 0.5);
  EXPECT_EQ(seen.sampling.top_k, 40);
  EXPECT_EQ(seen.sampling.top_p, 0.25);
  EXPECT_EQ(seen.sampling.min_p, 0.125);
  EXPECT_EQ(seen.sampling.seed, uint64_t{1} << 63);
  EXPECT_EQ(seen.sampling.repetition_penalty, 1.5);
  EXPECT_EQ(seen.sampling.presence_penalty, -0.5);
  EXPECT_EQ(seen.sampling.frequency_penalty, 0.75);
  EXPECT_EQ(seen.stopping.max_tokens, 2);
  EXPECT_EQ(seen.stopping.min_tokens, 1);
  EXPECT_EQ(seen.stopping.stop, std::vector<std::string>{"\nUser:"});
  EXPECT_EQ(seen.stopping.stop_token_ids, std::vector<TokenId>{7});
  EXPECT_TRUE(seen.stopping.ignore_eos);
  EXPECT_EQ(seen.logprobs, 3);
  EXPECT_EQ(seen.prompt_logprobs, 2);
  EXPECT_TRUE(seen.keep_special_tokens);
  EXPECT_LT(absl::AbsDuration(seen.deadline - absl::Now() - absl::Seconds(20)), absl::Seconds(5));
}

TEST_F(GenerationServiceTest, TextOfAPlainPromptIsNotSpecial) {
  Start();
  ASSERT_TRUE(Generate(TextRequest("<|im_start|>")).status.ok());
  const runtime::GenerateRequest seen = engine_->last_request().value();
  EXPECT_FALSE(std::get<std::vector<runtime::PromptSegment>>(seen.prompt)[0].allow_special);
  EXPECT_FALSE(seen.stopping.max_tokens.has_value());
  EXPECT_FALSE(seen.logprobs.has_value());
  EXPECT_EQ(seen.sampling.temperature, 1);
}

TEST_F(GenerationServiceTest, BadRequestsAreInvalidArguments) {
  testing_support::FakeEngineOptions fake;
  fake.max_context_tokens = 100;
  Start(fake);
  struct Case {
    std::string what;
    std::function<void(v1::GenerateRequest&)> edit;
    std::string reason;
  };
  for (const Case& c : {
           Case{"no prompt", [](auto& r) { r.clear_prompt(); }, "EMPTY_PROMPT"},
           Case{"empty text", [](auto& r) { r.set_text(""); }, "EMPTY_PROMPT"},
           Case{"temperature", [](auto& r) { r.mutable_sampling()->set_temperature(-1); },
                "INVALID_PARAMETER"},
           Case{"nan", [](auto& r) { r.mutable_sampling()->set_top_p(std::nanf("")); },
                "INVALID_PARAMETER"},
           Case{"top_k", [](auto& r) { r.mutable_sampling()->set_top_k(0xffffffff); },
                "INVALID_PARAMETER"},
           Case{"id in vocabulary", [](auto& r) { r.mutable_token_ids()->add_ids(256); },
                "INVALID_TOKEN_ID"},
           Case{"id in 31 bits", [](auto& r) { r.mutable_token_ids()->add_ids(0xffffffff); },
                "INVALID_TOKEN_ID"},
           Case{"stop id", [](auto& r) { r.mutable_stopping()->add_stop_token_ids(0xffffffff); },
                "INVALID_TOKEN_ID"},
           Case{"request id", [](auto& r) { r.set_request_id(std::string(257, 'x')); },
                "INVALID_PARAMETER"},
           Case{"too long", [](auto& r) { r.set_text(std::string(101, 'x')); },
                "CONTEXT_LENGTH_EXCEEDED"},
       }) {
    v1::GenerateRequest request = TextRequest("x");
    c.edit(request);
    const GenerateResult result = Generate(request);
    EXPECT_EQ(result.status.error_code(), StatusCode::INVALID_ARGUMENT) << c.what;
    EXPECT_EQ(result.reason(), c.reason) << c.what << ": " << result.status.error_message();
    EXPECT_FALSE(result.status.error_message().empty()) << c.what;
  }
  EXPECT_TRUE(Generate(TextRequest("still serving")).status.ok());
}

// What a program needs of an error it need not parse out of the message.
TEST_F(GenerationServiceTest, ErrorsCarryTheirNumbers) {
  testing_support::FakeEngineOptions fake;
  fake.max_context_tokens = 100;
  Start(fake);
  using Metadata = std::map<std::string, std::string>;
  struct Case {
    std::function<void(v1::GenerateRequest&)> edit;
    Metadata metadata;
  };
  for (const Case& c : {
           Case{[](auto& r) { r.mutable_sampling()->set_temperature(-0.5); },
                {{"field", "sampling.temperature"}, {"value", "-0.5"}, {"limit", "0"}}},
           Case{[](auto& r) { r.mutable_sampling()->set_top_p(7); },
                {{"field", "sampling.top_p"}, {"value", "7"}, {"limit", "1"}}},
           Case{[](auto& r) { r.mutable_sampling()->set_top_p(1.0000001f); },
                {{"field", "sampling.top_p"}, {"value", "1.0000001"}, {"limit", "1"}}},
           Case{[](auto& r) { r.mutable_sampling()->set_top_k(257); },
                {{"field", "sampling.top_k"}, {"value", "257"}, {"limit", "256"}}},
           Case{[](auto& r) { r.mutable_logprobs()->set_prompt_logprobs(21); },
                {{"field", "logprobs.prompt_logprobs"}, {"value", "21"}, {"limit", "20"}}},
           Case{[](auto& r) {
                  r.mutable_stopping()->set_max_tokens(3);
                  r.mutable_stopping()->set_min_tokens(4);
                },
                {{"field", "stopping.min_tokens"}, {"value", "4"}, {"limit", "3"}}},
           Case{[](auto& r) {
                  for (int i = 0; i < 17; ++i) r.mutable_stopping()->add_stop("x");
                },
                {{"field", "stopping.stop"}, {"value", "17"}, {"limit", "16"}}},
           Case{
               [](auto& r) {
                 r.mutable_token_ids()->add_ids(3);
                 r.mutable_token_ids()->add_ids(256);
               },
               {{"field", "token_ids.ids"}, {"value", "256"}, {"limit", "256"}, {"position", "1"}}},
           Case{[](auto& r) {
                  r.set_text(std::string(98, 'x'));
                  r.mutable_stopping()->set_min_tokens(3);
                },
                {{"prompt_tokens", "98"}, {"min_tokens", "3"}, {"max_context_tokens", "100"}}},
       }) {
    v1::GenerateRequest request = TextRequest("x");
    c.edit(request);
    const GenerateResult result = Generate(request);
    EXPECT_EQ(result.status.error_code(), StatusCode::INVALID_ARGUMENT);
    EXPECT_EQ(DescribeError(result.status).metadata, c.metadata) << result.status.error_message();
  }
}

TEST_F(GenerationServiceTest, TextWithoutATokenizerIsRefused) {
  testing_support::FakeEngineOptions fake;
  fake.has_tokenizer = false;
  Start(fake);
  EXPECT_EQ(Generate(TextRequest("x")).reason(), "NO_TOKENIZER");
  v1::GenerateRequest request;
  request.mutable_token_ids()->add_ids(3);
  EXPECT_TRUE(Generate(request).status.ok());
}

TEST_F(GenerationServiceTest, InvalidUtf8InARequestIsAnInvalidArgument) {
  Start();
  // Field 2 (text) of GenerateRequest, and field 1 (text) of TokenizeRequest, with half a
  // character.
  const std::string generate("\x12\x02\xe6\xad", 4);
  const std::string tokenize("\x0a\x02\xe6\xad", 4);
  for (const RawResult& result :
       {RawCall(channel_, "/writescope.v1.GenerationService/Generate", generate),
        RawCall(channel_, "/writescope.v1.GenerationService/Tokenize", tokenize)}) {
    EXPECT_EQ(result.status.error_code(), StatusCode::INVALID_ARGUMENT)
        << result.status.error_message();
    EXPECT_EQ(DescribeError(result.status).reason, "INVALID_UTF8");
  }
  const RawResult garbage =
      RawCall(channel_, "/writescope.v1.GenerationService/Generate", "\x12\x7f no");
  EXPECT_EQ(garbage.status.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(DescribeError(garbage.status).reason, "MALFORMED_MESSAGE");
}

// R1, R2: a message with broken text anywhere in a stream must not cost a message, nor hang a
// client.
TEST_F(GenerationServiceTest, BrokenTextOfTheEngineNeverLeaves) {
  testing_support::FakeEngineOptions fake;
  fake.edit_event = [](runtime::GenerateEvent& event) {
    if (event.tokens.empty()) return;
    event.text = event.usage.generated_tokens % 2 == 0 ? "\xe6\xad" : "ok";
  };
  Start(fake);
  v1::GenerateRequest request = TextRequest("x");
  request.mutable_stopping()->set_max_tokens(4);
  const GenerateResult result = Generate(request);
  ASSERT_TRUE(result.status.ok()) << result.status.error_message();
  EXPECT_EQ(result.text, "ok\xef\xbf\xbdok\xef\xbf\xbd");
  EXPECT_TRUE(result.messages.back().has_finish());
  EXPECT_THAT(MetricsText(), HasSubstr("writescope_repaired_text_total{model=\"fake\"} 2"));
}

// R4: above gRPC's own limit, below ours.
TEST_F(GenerationServiceTest, TakesAPromptOf5MiB) {
  Start();
  const GenerateResult result = Generate(TextRequest(std::string(5 << 20, 'x')));
  ASSERT_TRUE(result.status.ok()) << result.status.error_message();
  EXPECT_EQ(result.messages.back().usage().prompt_tokens(), 5u << 20);
}

TEST_F(GenerationServiceTest, RefusesAMessageAboveTheLimit) {
  Start({}, [](WorkerConfig& config) { config.max_request_bytes = 1 << 20; });
  EXPECT_EQ(Generate(TextRequest(std::string(2 << 20, 'x'))).status.error_code(),
            StatusCode::RESOURCE_EXHAUSTED);
}

TEST_F(GenerationServiceTest, ManyPromptLogprobsAreSplit) {
  testing_support::FakeEngineOptions fake;
  fake.edit_event = [](runtime::GenerateEvent& event) {
    if (!event.finish.has_value()) return;
    for (int i = 0; i < 1200; ++i) {
      runtime::PositionLogprobs position;
      if (i > 0) position.token = {.token = i, .logprob = -1.0f, .rank = 1};
      position.top.resize(20);
      event.prompt_logprobs.push_back(position);
    }
  };
  Start(fake);
  v1::GenerateRequest request = TextRequest("x");
  request.mutable_stopping()->set_max_tokens(1);
  const GenerateResult result = Generate(request);
  ASSERT_TRUE(result.status.ok());
  uint32_t positions = 0;
  for (const v1::GenerateResponse& message : result.messages) {
    EXPECT_LE(message.prompt_logprobs_size(), 512);
    for (const v1::PositionLogprobs& position : message.prompt_logprobs()) {
      EXPECT_EQ(position.has_token(), positions > 0);
      if (positions > 0) {
        EXPECT_EQ(position.token().token_id(), positions);
      }
      ++positions;
    }
  }
  EXPECT_EQ(positions, 1200u);
  EXPECT_TRUE(result.messages.back().has_finish());
}

TEST_F(GenerationServiceTest, DuplicateIdIsRefusedWhileInFlight) {
  Start();
  engine_->Freeze(true);
  grpc::ClientContext context;
  SetDeadline(context);
  auto first = generation_->Generate(&context, TextRequest("x", "same"));
  ASSERT_TRUE(Eventually([&] { return engine_->in_flight("same"); }));
  const GenerateResult second = Generate(TextRequest("y", "same"));
  EXPECT_EQ(second.status.error_code(), StatusCode::ALREADY_EXISTS);
  EXPECT_EQ(second.reason(), "DUPLICATE_REQUEST_ID");
  engine_->Freeze(false);
  v1::GenerateResponse message;
  while (first->Read(&message)) {
  }
  EXPECT_TRUE(first->Finish().ok());
  EXPECT_TRUE(Generate(TextRequest("z", "same")).status.ok());
}

TEST_F(GenerationServiceTest, FullQueueSaysSoAndDoesNotCommitTheCall) {
  testing_support::FakeEngineOptions fake;
  fake.max_sequences = 1;
  fake.max_queue = 0;
  Start(fake);
  engine_->Freeze(true);
  grpc::ClientContext context;
  SetDeadline(context);
  auto first = generation_->Generate(&context, TextRequest("x", "first"));
  // Admitted: the headers are here before any message is.
  first->WaitForInitialMetadata();
  ASSERT_TRUE(engine_->in_flight("first"));
  const GenerateResult second = Generate(TextRequest("y"));
  EXPECT_EQ(second.status.error_code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(second.reason(), "QUEUE_FULL");
  const std::string metrics = MetricsText();
  EXPECT_THAT(
      metrics,
      HasSubstr("writescope_queue_rejections_total{model=\"fake\",reason=\"queue_full\"} 1"));
  engine_->Freeze(false);
  v1::GenerateResponse message;
  while (first->Read(&message)) {
  }
  EXPECT_TRUE(first->Finish().ok());
}

TEST_F(GenerationServiceTest, CancelInMidStreamReachesTheEngineAtOnce) {
  Start();
  v1::GenerateRequest request = TextRequest("x", "gone");
  request.mutable_stopping()->set_max_tokens(1'000'000);
  grpc::ClientContext context;
  SetDeadline(context);
  auto reader = generation_->Generate(&context, request);
  v1::GenerateResponse message;
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(reader->Read(&message));
  const absl::Time cancelled = absl::Now();
  context.TryCancel();
  ASSERT_TRUE(Eventually([&] { return engine_->cancel_time("gone") != absl::InfinitePast(); }));
  EXPECT_LT(engine_->cancel_time("gone") - cancelled, absl::Seconds(1));
  while (reader->Read(&message)) {
  }
  EXPECT_EQ(reader->Finish().error_code(), StatusCode::CANCELLED);
  EXPECT_TRUE(Eventually([&] { return !engine_->in_flight("gone"); }));
}

// R6: a handler that is silent still sees its client's deadline.
TEST_F(GenerationServiceTest, DeadlineDuringSilenceReachesTheEngine) {
  Start();
  engine_->Freeze(true);
  const absl::Time deadline = absl::Now() + absl::Milliseconds(300);
  const GenerateResult result = Generate(TextRequest("x", "late"), absl::Milliseconds(300));
  EXPECT_EQ(result.status.error_code(), StatusCode::DEADLINE_EXCEEDED);
  ASSERT_TRUE(Eventually([&] { return engine_->cancel_time("late") != absl::InfinitePast(); }));
  EXPECT_LT(engine_->cancel_time("late") - deadline, absl::Seconds(1));
  EXPECT_TRUE(Eventually([&] {
    return MetricsText().find(
               "code=\"DEADLINE_EXCEEDED\",finish_reason=\"none\",method=\"Generate\"") !=
           std::string::npos;
  }));
}

TEST_F(GenerationServiceTest, DeadlineOfOneMillisecondHarmsNobody) {
  Start();
  for (int i = 0; i < 20; ++i) {
    const GenerateResult result = Generate(TextRequest("x"), absl::Milliseconds(1));
    EXPECT_EQ(result.status.error_code(), StatusCode::DEADLINE_EXCEEDED);
  }
  EXPECT_TRUE(Generate(TextRequest("x")).status.ok());
  EXPECT_TRUE(Eventually([&] { return engine_->state().running_requests == 0; }));
}

TEST_F(GenerationServiceTest, ManyClientsThatLeaveAtRandomLeaveNothingBehind) {
  testing_support::FakeEngineOptions fake;
  fake.step = absl::Microseconds(200);
  fake.max_queue = 100;
  Start(fake);
  std::vector<std::thread> clients;
  for (int client = 0; client < 8; ++client) {
    clients.emplace_back([&, client] {
      for (int i = 0; i < 25; ++i) {
        v1::GenerateRequest request = TextRequest("x");
        request.mutable_stopping()->set_max_tokens(200);
        grpc::ClientContext context;
        SetDeadline(context);
        auto reader = generation_->Generate(&context, request);
        v1::GenerateResponse message;
        for (int reads = (client * 7 + i * 3) % 11; reads > 0; --reads) reader->Read(&message);
        context.TryCancel();
        reader->Finish();
      }
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_TRUE(Eventually([&] {
    const runtime::EngineState state = engine_->state();
    return state.running_requests + state.waiting_requests == 0;
  }));
  EXPECT_TRUE(Generate(TextRequest("x")).status.ok());
}

TEST_F(GenerationServiceTest, AbortEndsARequestWell) {
  Start();
  v1::GenerateRequest request = TextRequest("x", "victim");
  request.mutable_stopping()->set_max_tokens(1'000'000);
  grpc::ClientContext context;
  SetDeadline(context);
  auto reader = generation_->Generate(&context, request);
  v1::GenerateResponse message;
  ASSERT_TRUE(reader->Read(&message));
  grpc::ClientContext abort_context;
  SetDeadline(abort_context);
  v1::AbortRequest abort;
  abort.set_request_id("victim");
  v1::AbortResponse reply;
  ASSERT_TRUE(generation_->Abort(&abort_context, abort, &reply).ok());
  EXPECT_TRUE(reply.found());
  while (reader->Read(&message)) {
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(message.finish().reason(), v1::FINISH_REASON_ABORTED);
  grpc::ClientContext again_context;
  SetDeadline(again_context);
  ASSERT_TRUE(generation_->Abort(&again_context, abort, &reply).ok());
  EXPECT_FALSE(reply.found());
}

TEST_F(GenerationServiceTest, TokenizeAndDetokenize) {
  Start();
  grpc::ClientContext context;
  SetDeadline(context);
  v1::TokenizeRequest request;
  request.set_text("a\xc3\xa9");
  request.set_add_bos(true);
  v1::TokenizeResponse tokens;
  ASSERT_TRUE(generation_->Tokenize(&context, request, &tokens).ok());
  ASSERT_EQ(tokens.token_ids_size(), 4);
  EXPECT_EQ(tokens.token_ids(2), 0xc3u);
  EXPECT_EQ(tokens.token_bytes(2), "\xc3");
  v1::DetokenizeRequest back;
  back.add_token_ids('a');
  back.add_token_ids(0xc3);
  v1::DetokenizeResponse text;
  grpc::ClientContext back_context;
  SetDeadline(back_context);
  // Half a character: repaired, since the rest is not there.
  ASSERT_TRUE(generation_->Detokenize(&back_context, back, &text).ok());
  EXPECT_EQ(text.text(), "a\xef\xbf\xbd");
  back.add_token_ids(5000);
  grpc::ClientContext bad_context;
  SetDeadline(bad_context);
  EXPECT_EQ(generation_->Detokenize(&bad_context, back, &text).error_code(),
            StatusCode::INVALID_ARGUMENT);
  grpc::ClientContext empty_context;
  SetDeadline(empty_context);
  EXPECT_EQ(generation_->Tokenize(&empty_context, {}, &tokens).error_code(),
            StatusCode::INVALID_ARGUMENT);
}

TEST_F(GenerationServiceTest, ModelInfoHasTheLimits) {
  Start();
  grpc::ClientContext context;
  SetDeadline(context);
  v1::GetModelInfoResponse info;
  ASSERT_TRUE(generation_->GetModelInfo(&context, {}, &info).ok());
  EXPECT_EQ(info.model(), "fake");
  EXPECT_EQ(info.vocab_size(), 256u);
  EXPECT_TRUE(info.has_tokenizer());
  EXPECT_EQ(info.limits().max_request_bytes(), 64u << 20);
  EXPECT_EQ(info.limits().max_stop_strings(), 16u);
  EXPECT_FALSE(info.version().empty());
}

TEST_F(GenerationServiceTest, LoadingIsUnavailable) {
  ListenOnly();
  const GenerateResult result = Generate(TextRequest("x"));
  EXPECT_EQ(result.status.error_code(), StatusCode::UNAVAILABLE);
  EXPECT_EQ(result.reason(), "LOADING");
  Load();
  EXPECT_TRUE(Generate(TextRequest("x")).status.ok());
}

}  // namespace
}  // namespace writescope::server
