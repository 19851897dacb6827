#include "controller/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace writescope::controller {
namespace {

using ::testing::HasSubstr;

TEST(ConfigTest, Defaults) {
  const ParsedConfig parsed = ParseConfig({});
  ASSERT_TRUE(parsed.config.has_value()) << parsed.message;
  EXPECT_EQ(parsed.config->worker_address, "127.0.0.1:50052");
  EXPECT_EQ(parsed.config->control.lease, absl::Seconds(15));
  EXPECT_FALSE(parsed.config->control.shadow);
  EXPECT_FALSE(parsed.config->control.policy.pin_share.has_value());
  // Unique, even for processes of the same number in two containers.
  EXPECT_NE(parsed.config->control.controller_id, ParseConfig({}).config->control.controller_id);
}

TEST(ConfigTest, EveryFlagArrives) {
  const ParsedConfig parsed = ParseConfig(
      {"--worker=unix:/run/w.sock", "--metrics-listen", "0.0.0.0:0", "--lease=30s",
       "--interval=100ms", "--shadow", "--pin-share=0", "--decision-log=/tmp/d",
       "--decision-log-mib=2", "--controller-id=c1", "--log-level=debug", "--hysteresis=0.03",
       "--max-loss=0.04", "--max-change=0.5", "--guard=0.01", "--min-steps=9"});
  ASSERT_TRUE(parsed.config.has_value()) << parsed.message;
  const Config& config = *parsed.config;
  EXPECT_EQ(config.worker_address, "unix:/run/w.sock");
  EXPECT_EQ(config.metrics_listen, "0.0.0.0:0");
  EXPECT_EQ(config.decision_log, "/tmp/d");
  EXPECT_EQ(config.decision_log_bytes, 2 << 20);
  EXPECT_EQ(config.log_level, LogLevel::kDebug);
  EXPECT_EQ(config.control.controller_id, "c1");
  EXPECT_EQ(config.control.lease, absl::Seconds(30));
  EXPECT_EQ(config.control.interval, absl::Milliseconds(100));
  EXPECT_TRUE(config.control.shadow);
  const PolicyOptions& policy = config.control.policy;
  EXPECT_EQ(policy.pin_share, 0.0) << "0 is a pin, not the absence of one";
  EXPECT_EQ(policy.hysteresis, 0.03);
  EXPECT_EQ(policy.max_loss, 0.04);
  EXPECT_EQ(policy.max_change, 0.5);
  EXPECT_EQ(policy.guard, 0.01);
  EXPECT_EQ(policy.min_steps, 9u);
}

TEST(ConfigTest, AnEmptyValueTakesNoOtherFlag) {
  const ParsedConfig parsed = ParseConfig({"--decision-log=", "--lease=20s"});
  ASSERT_TRUE(parsed.config.has_value()) << parsed.message;
  EXPECT_EQ(parsed.config->decision_log, "");
  EXPECT_EQ(parsed.config->control.lease, absl::Seconds(20));
}

TEST(ConfigTest, MistakesAreNamed) {
  const auto message = [](const std::vector<std::string>& args) {
    const ParsedConfig parsed = ParseConfig(args);
    EXPECT_FALSE(parsed.config.has_value());
    EXPECT_EQ(parsed.exit_code, 2);
    return parsed.message;
  };
  EXPECT_THAT(message({"--min-steps=-1"}), HasSubstr("--min-steps: '-1' is not a whole number"));
  EXPECT_THAT(message({"--lease=tomorrow"}), HasSubstr("--lease is \"tomorrow\""));
  EXPECT_THAT(message({"--lease=500ms"}), HasSubstr("lease is 500ms"));
  EXPECT_THAT(message({"--lease=2s", "--interval=1s"}), HasSubstr("four intervals"));
  EXPECT_THAT(message({"--pin-share=40"}), HasSubstr("pin-share is 40"));
  EXPECT_THAT(message({"--pin-share=nan"}), HasSubstr("pin-share is nan"));
  EXPECT_THAT(message({"--pin-share=much"}), HasSubstr("--pin-share"));
  EXPECT_THAT(message({"--log-level=loud"}), HasSubstr("--log-level is \"loud\""));
  EXPECT_THAT(message({"--metrics-listen=9465"}), HasSubstr("is not host:port"));
  EXPECT_THAT(message({"--nonsense"}), HasSubstr("--nonsense"));
  for (const char* worker : {"--worker=somewhere", "--worker=host:99999",
                             "--worker=unix:", "--worker=http://host:50052"}) {
    EXPECT_THAT(message({worker}), HasSubstr("is not host:port with a port in [1, 65535]"));
  }
  EXPECT_THAT(message({"--metrics-listen=127.0.0.1:99999"}), HasSubstr("a port in [0, 65535]"));
  EXPECT_THAT(message({"--controller-id=\xff"}), HasSubstr("--controller-id: not valid UTF-8"));
  EXPECT_THAT(message({"--guard="}), HasSubstr("--guard: '' is not a number"));
  EXPECT_THAT(message({"--decision-log-mib=0"}), HasSubstr("--decision-log-mib is 0"));
}

TEST(ConfigTest, HelpVersionAndPrint) {
  for (const char* flag : {"--help", "--version", "--print-config"}) {
    const ParsedConfig parsed = ParseConfig({flag});
    EXPECT_FALSE(parsed.config.has_value());
    EXPECT_EQ(parsed.exit_code, 0);
    EXPECT_FALSE(parsed.message.empty());
  }
  EXPECT_THAT(ParseConfig({"--help"}).message, HasSubstr("--pin-share"));
  EXPECT_THAT(ParseConfig({"--print-config", "--lease=20s"}).message, HasSubstr("lease = 20s"));
  // A flag that is missing there cannot be seen by who looks why a controller does what it does.
  const std::string printed = ParseConfig({"--print-config", "--log-level=debug"}).message;
  for (const char* line :
       {"worker = ", "metrics-listen = ", "controller-id = ", "lease = ", "interval = ",
        "shadow = ", "hysteresis = ", "max-loss = ", "max-change = ", "guard = ", "min-steps = ",
        "pin-share = ", "decision-log = ", "decision-log-mib = ", "log-level = debug"}) {
    EXPECT_THAT(printed, HasSubstr(line));
  }
  EXPECT_THAT(ParseConfig({"--version"}).message, HasSubstr("writescope-controller 0"));
}

TEST(ConfigTest, Replay) {
  const ParsedReplayConfig parsed = ParseReplayConfig({"log", "--hysteresis=0.1", "--rows=7"});
  ASSERT_TRUE(parsed.config.has_value()) << parsed.message;
  EXPECT_EQ(parsed.config->path, "log");
  EXPECT_EQ(parsed.config->policy.hysteresis, 0.1);
  EXPECT_EQ(parsed.config->rows, 7);
  EXPECT_EQ(ParseReplayConfig({}).exit_code, 2);
  EXPECT_EQ(ParseReplayConfig({"log", "--guard=-1"}).exit_code, 2);
}

}  // namespace
}  // namespace writescope::controller
