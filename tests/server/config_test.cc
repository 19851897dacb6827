#include "server/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/support/temp_dir.h"

namespace writescope::server {
namespace {

using ::testing::HasSubstr;

std::vector<std::string> With(std::vector<std::string> more) {
  std::vector<std::string> all = {"--model=/models/x", "--vram-budget=40MiB"};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

TEST(WorkerConfig, DefaultsNeedOnlyModelAndBudget) {
  const ParsedConfig parsed = ParseWorkerConfig(With({}));
  ASSERT_TRUE(parsed.config.has_value()) << parsed.message;
  EXPECT_EQ(parsed.config->engine.model_dir, "/models/x");
  EXPECT_EQ(parsed.config->engine.vram_budget_bytes, 40 * kMiB);
  EXPECT_EQ(parsed.config->listen, "127.0.0.1:50051");
  EXPECT_EQ(parsed.config->engine.cut, runtime::CutMode::kMeet);
  EXPECT_EQ(parsed.config->engine.micro_batching, runtime::MicroBatching::kAuto);
  EXPECT_TRUE(parsed.config->engine.prefix_cache);
  EXPECT_TRUE(parsed.config->engine.retention);
}

TEST(WorkerConfig, EveryFlagDoesSomething) {
  const ParsedConfig parsed = ParseWorkerConfig(With({"--device=cpu",
                                                      "--listen=0.0.0.0:1",
                                                      "--control-listen=unix:/tmp/c.sock",
                                                      "--metrics-listen=[::1]:9",
                                                      "--metrics-compat=vllm",
                                                      "--worker-id=w",
                                                      "--host-budget=1.5GiB",
                                                      "--kv-dtype=f32",
                                                      "--max-context=100",
                                                      "--max-sequences=3",
                                                      "--max-queue=5",
                                                      "--step-graphs=3",
                                                      "--prefill-chunk=64",
                                                      "--ring-size=2MiB",
                                                      "--workers=7",
                                                      "--device-threads=2",
                                                      "--cut=planned",
                                                      "--micro-batches=2",
                                                      "--share-interval=0.3,0.75",
                                                      "--link-gbps=1.5",
                                                      "--no-prefix-cache",
                                                      "--no-retention",
                                                      "--wait-limit=500ms",
                                                      "--request-time-limit=1h",
                                                      "--progress-interval=2s",
                                                      "--max-request-size=2MiB",
                                                      "--drain-timeout=7",
                                                      "--shutdown-grace=3s",
                                                      "--stall-limit=9s",
                                                      "--stream-buffer=64KiB",
                                                      "--stream-stall-limit=4s",
                                                      "--max-connection-age=1m",
                                                      "--max-connection-age-grace=2m",
                                                      "--log-level=debug",
                                                      "--plan-only"}));
  ASSERT_TRUE(parsed.config.has_value()) << parsed.message;
  const WorkerConfig& config = *parsed.config;
  EXPECT_EQ(config.listen, "0.0.0.0:1");
  EXPECT_EQ(config.control_listen, "unix:/tmp/c.sock");
  EXPECT_EQ(config.metrics_listen, "[::1]:9");
  EXPECT_TRUE(config.vllm_metrics);
  EXPECT_EQ(config.worker_id, "w");
  EXPECT_EQ(config.engine.host_budget_bytes, 3 * kGiB / 2);
  EXPECT_EQ(config.engine.kv_dtype, KvDtype::kF32);
  EXPECT_EQ(config.engine.max_context_tokens, 100);
  EXPECT_EQ(config.engine.max_sequences, 3);
  EXPECT_EQ(config.engine.max_queue, 5);
  EXPECT_EQ(config.engine.max_step_graphs, 3);
  EXPECT_EQ(config.engine.prefill_chunk_tokens, 64);
  EXPECT_EQ(config.engine.ring_bytes, 2 * kMiB);
  EXPECT_EQ(config.engine.cpu_workers, 7);
  EXPECT_EQ(config.engine.device_threads, 2);
  EXPECT_EQ(config.engine.cut, runtime::CutMode::kPlanned);
  EXPECT_EQ(config.engine.micro_batching, runtime::MicroBatching::kTwo);
  EXPECT_EQ(config.engine.min_cpu_share, 0.3);
  EXPECT_EQ(config.engine.max_cpu_share, 0.75);
  EXPECT_EQ(config.engine.link_bytes_per_s, 1.5e9);
  EXPECT_FALSE(config.engine.prefix_cache);
  EXPECT_FALSE(config.engine.retention);
  EXPECT_EQ(config.engine.wait_limit, absl::Milliseconds(500));
  EXPECT_EQ(config.engine.request_time_limit, absl::Hours(1));
  EXPECT_EQ(config.engine.progress_interval, absl::Seconds(2));
  EXPECT_EQ(config.max_request_bytes, 2 * kMiB);
  EXPECT_EQ(config.drain_timeout, absl::Seconds(7));
  EXPECT_EQ(config.shutdown_grace, absl::Seconds(3));
  EXPECT_EQ(config.stall_limit, absl::Seconds(9));
  EXPECT_EQ(config.stream_buffer_bytes, 64 * kKiB);
  EXPECT_EQ(config.stream_stall_limit, absl::Seconds(4));
  EXPECT_EQ(config.max_connection_age, absl::Minutes(1));
  EXPECT_EQ(config.max_connection_age_grace, absl::Minutes(2));
  EXPECT_EQ(config.log_level, LogLevel::kDebug);
  EXPECT_TRUE(config.plan_only);
}

TEST(WorkerConfig, ErrorsNameTheFlagAndTheValue) {
  struct Case {
    std::string flag;
    std::string expected;
  };
  for (const Case& c : {Case{"--device=cuda:x", "'cuda:x'"},
                        Case{"--device=tpu", "'tpu'"},
                        Case{"--weights=int3", "'int3'"},
                        Case{"--compute-dtype=f16", "'f16'"},
                        Case{"--load-format=gguf", "'gguf'"},
                        Case{"--device-waits=never", "'never'"},
                        Case{"--host-budget=12gib", "--host-budget: size '12gib'"},
                        Case{"--host-budget=0", "--host-budget: 0 bytes"},
                        Case{"--listen=", "--listen: ''"},
                        Case{"--kv-dtype=fp8", "'fp8'"},
                        Case{"--cut=half", "'half'"},
                        Case{"--micro-batches=3", "'3'"},
                        Case{"--share-interval=0.9,0.1", "--share-interval"},
                        Case{"--link-gbps=-1", "-1"},
                        Case{"--link-gbps=0.0009", "nor in [0.001, 1e6]"},
                        Case{"--max-sequences=0", "--max-sequences: 0"},
                        Case{"--workers=-2", "--workers: -2"},
                        Case{"--listen=nowhere", "'nowhere'"},
                        Case{"--listen=127.0.0.1:70000", "70000"},
                        Case{"--control-listen=::1:50052", "'::1:50052'"},
                        Case{"--metrics-listen=unix:/tmp/x", "--metrics-listen"},
                        Case{"--worker-id=\xff", "--worker-id: not valid UTF-8"},
                        Case{"--metrics-compat=tgi", "'tgi'"},
                        Case{"--max-queue=0", "--max-queue: 0"},
                        Case{"--wait-limit=0s", "--wait-limit: 0s"},
                        Case{"--listen=127.0.0.1:50052", "'127.0.0.1:50052' is --listen's too"},
                        Case{"--metrics-listen=127.0.0.1:50051", "--metrics-listen"},
                        Case{"--drain-timeout=-1s", "--drain-timeout"},
                        Case{"--log-level=loud", "'loud'"},
                        Case{"--machine-profile=/no/such/file", "--machine-profile"},
                        Case{"--no-such-flag", "no-such-flag"},
                        Case{"--max-queue=many", "many"}}) {
    const ParsedConfig parsed = ParseWorkerConfig(With({c.flag}));
    EXPECT_FALSE(parsed.config.has_value()) << c.flag;
    EXPECT_EQ(parsed.exit_code, 2) << c.flag;
    EXPECT_THAT(parsed.message, HasSubstr(c.expected)) << c.flag;
  }
  for (const char* number : {"max-context", "step-graphs", "link-gbps"}) {
    EXPECT_THAT(ParseWorkerConfig(With({absl::StrCat("--", number, "=")})).message,
                HasSubstr("'' is not a"));
  }
  EXPECT_THAT(ParseWorkerConfig(With({"--max-queue=010"})).message, HasSubstr("'010' is not a"));
  EXPECT_THAT(ParseWorkerConfig({"--model=x"}).message, HasSubstr("--vram-budget is required"));
  EXPECT_THAT(ParseWorkerConfig({"--vram-budget=1GiB"}).message, HasSubstr("--model is required"));
}

TEST(WorkerConfig, AnEmptyValueTakesNoOtherFlag) {
  const ParsedConfig parsed = ParseWorkerConfig(With({"--metrics-listen=", "--max-queue=7"}));
  ASSERT_TRUE(parsed.config.has_value()) << parsed.message;
  EXPECT_EQ(parsed.config->metrics_listen, "");
  EXPECT_EQ(parsed.config->engine.max_queue, 7);
  EXPECT_TRUE(ParseWorkerConfig(With({"--metrics-listen="})).config.has_value());
}

TEST(WorkerConfig, HelpAndVersionAreNoErrors) {
  const ParsedConfig help = ParseWorkerConfig({"--help"});
  EXPECT_EQ(help.exit_code, 0);
  EXPECT_THAT(help.message, HasSubstr("--vram-budget"));
  const ParsedConfig version = ParseWorkerConfig({"--version"});
  EXPECT_EQ(version.exit_code, 0);
  EXPECT_THAT(version.message, HasSubstr("writescope-worker "));
}

TEST(WorkerConfig, PrintedConfigReadsBack) {
  const ParsedConfig printed = ParseWorkerConfig(
      With({"--cut=planned", "--max-queue=9", "--no-retention", "--print-config"}));
  EXPECT_EQ(printed.exit_code, 0);
  EXPECT_FALSE(printed.config.has_value());
  const std::string path = ::testing::TempDir() + "/worker.toml";
  std::ofstream(path) << printed.message;
  const ParsedConfig read = ParseWorkerConfig({"--config=" + path});
  std::remove(path.c_str());
  ASSERT_TRUE(read.config.has_value()) << read.message << "\nof\n" << printed.message;
  EXPECT_EQ(read.config->engine.cut, runtime::CutMode::kPlanned);
  EXPECT_EQ(read.config->engine.max_queue, 9);
  EXPECT_FALSE(read.config->engine.retention);
  EXPECT_TRUE(read.config->engine.prefix_cache);
  EXPECT_EQ(read.config->engine.vram_budget_bytes, 40 * kMiB);
}

TEST(WorkerConfig, PrintedPathsReadBackWhateverIsInThem) {
  const std::string path = ::testing::TempDir() + "/paths.toml";
  for (const std::string model : {"/m/a#b", "#m", "/m/a b", "/m/a b#c", "/m/[x]", "/m/a,b",
                                  "/m/a;b", "/m/it's#1", "/m/x\"y", "/m/b\\c", "m = 3"}) {
    const std::vector<std::string> flags = {"--model=" + model, "--vram-budget=40MiB"};
    std::vector<std::string> print = flags;
    print.push_back("--print-config");
    std::ofstream(path) << ParseWorkerConfig(print).message;
    const ParsedConfig read = ParseWorkerConfig({"--config=" + path});
    ASSERT_TRUE(read.config.has_value()) << model << ": " << read.message;
    EXPECT_EQ(read.config->engine.model_dir, model);
  }
  std::remove(path.c_str());
}

TEST(WorkerConfig, CommentsInAFileAreNoValues) {
  const std::string path = ::testing::TempDir() + "/comments.toml";
  std::ofstream(path) << "# \"all of it\nmodel=\"m\"  # \"the folder\"\nvram-budget=40MiB# small\n"
                      << "  max-queue=7 #9\n";
  const ParsedConfig read = ParseWorkerConfig({"--config=" + path});
  std::remove(path.c_str());
  ASSERT_TRUE(read.config.has_value()) << read.message;
  EXPECT_EQ(read.config->engine.model_dir, "m");
  EXPECT_EQ(read.config->engine.max_queue, 7);
}

TEST(WorkerConfig, AFileWithAnUnknownKeyIsRefused) {
  const std::string path = ::testing::TempDir() + "/misspelt.toml";
  std::ofstream(path) << "model=\"m\"\nvram-budget=\"40MiB\"\nmax-sequencess=3\n";
  const ParsedConfig read = ParseWorkerConfig({"--config=" + path});
  std::remove(path.c_str());
  EXPECT_FALSE(read.config.has_value());
  EXPECT_EQ(read.exit_code, 2);
  EXPECT_THAT(read.message, HasSubstr("the file's key 'max-sequencess' is no flag"));
}

TEST(WorkerConfig, FilesOfOtherSystemsAreRead) {
  const std::string path = ::testing::TempDir() + "/other_system.toml";
  std::ofstream(path)
      << "\xef\xbb\xbfmodel=\"m\"\r\nvram-budget=\"40MiB\"\r\nno-retention=true\r\n";
  const ParsedConfig read = ParseWorkerConfig({"--config=" + path});
  ASSERT_TRUE(read.config.has_value()) << read.message;
  EXPECT_EQ(read.config->engine.model_dir, "m");
  EXPECT_EQ(read.config->engine.vram_budget_bytes, 40 * kMiB);
  EXPECT_FALSE(read.config->engine.retention);
  std::ofstream(path) << "model=\"m\"\n[worker]\nvram-budget=\"40MiB\"\n";
  EXPECT_THAT(ParseWorkerConfig({"--config=" + path}).message,
              HasSubstr("line 2: [worker] begins a section, and there are none"));
  std::ofstream(path) << "no-retention=maybe\n";
  EXPECT_THAT(ParseWorkerConfig(With({"--config=" + path})).message,
              HasSubstr("--no-retention = maybe is neither true nor false"));
  std::remove(path.c_str());
}

TEST(WorkerConfig, AKeyWithoutAValueIsRefused) {
  const std::string path = ::testing::TempDir() + "/no_value.toml";
  for (const std::string key : {"max-context", "metrics-listen", "no-retention"}) {
    std::ofstream(path) << "model=\"m\"\nvram-budget=\"40MiB\"\n" << key << "=\n";
    const ParsedConfig read = ParseWorkerConfig({"--config=" + path});
    EXPECT_FALSE(read.config.has_value()) << key;
    EXPECT_EQ(read.exit_code, 2);
    EXPECT_THAT(read.message, HasSubstr("line 3: " + key + "= has no value"));
  }
  std::ofstream(path) << "model=\"m\"\nvram-budget=\"40MiB\"\nmetrics-listen=\"\"\n";
  const ParsedConfig read = ParseWorkerConfig({"--config=" + path});
  std::remove(path.c_str());
  ASSERT_TRUE(read.config.has_value()) << read.message;
  EXPECT_EQ(read.config->metrics_listen, "");
}

TEST(WorkerConfig, OnlyARegularFileIsRead) {
  const testing_support::TempDir dir;
  ASSERT_EQ(mkfifo(dir.File("fifo").c_str(), 0600), 0);
  for (const std::string& path : {dir.File("fifo"), dir.path(), std::string("/dev/null")}) {
    const ParsedConfig read = ParseWorkerConfig({"--config=" + path});
    EXPECT_EQ(read.exit_code, 2) << path;
    EXPECT_THAT(read.message, HasSubstr(path + " is not a regular file"));
  }
  EXPECT_THAT(ParseWorkerConfig({"--config=/no/such/file"}).message,
              HasSubstr("cannot open /no/such/file"));
  EXPECT_THAT(ParseWorkerConfig(With({"--config="})).message, HasSubstr("--config"));
}

}  // namespace
}  // namespace writescope::server
