#include "engine/roofline/machine_profile.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "absl/strings/str_replace.h"

namespace writescope::roofline {
namespace {

using ::testing::HasSubstr;

constexpr char kMinimal[] = R"({
  "name": "m",
  "rates": {"cpu_alone_bytes_per_second": 10, "cpu_with_link_bytes_per_second": 8,
            "link_alone_bytes_per_second": 5, "link_with_cpu_bytes_per_second": 4,
            "device_bytes_per_second": 100}})";

std::string Error(const std::string& json) {
  const auto profile = ParseMachineProfile(json);
  EXPECT_FALSE(profile.ok()) << json;
  return std::string(profile.status().message());
}

std::string Changed(const std::string& from, const std::string& to) {
  return absl::StrReplaceAll(kMinimal, {{from, to}});
}

TEST(MachineProfileTest, ShippedProfilesAreValid) {
  const struct {
    const char* name;
    bool measured;
  } shipped[] = {{"v100-pcie3", false}, {"a100-pcie4", false}, {"h200-pcie5", true}};
  double last_link = 0;
  for (const auto& [name, measured] : shipped) {
    const auto profile =
        ReadMachineProfile(std::string(WRITESCOPE_PROFILE_DIR "/") + name + ".json");
    ASSERT_TRUE(profile.ok()) << profile.status();
    EXPECT_EQ(profile->name, name);
    EXPECT_EQ(profile->measured, measured);
    EXPECT_EQ(profile->source.find("ESTIMATE") == 0, !measured) << profile->source;
    EXPECT_GT(profile->rates.link_alone, 1.5 * last_link) << "a PCIe generation doubles the link";
    last_link = profile->rates.link_alone;
    EXPECT_EQ(profile->device_budget_bytes, int64_t{32} << 30);
  }
}

TEST(MachineProfileTest, RoundTrip) {
  MachineProfile profile;
  profile.name = "round \"trip\"";
  profile.measured = true;
  profile.source = "a test";
  profile.rates = {115.5e9, 94.25e9, 53e9, 42e9, 4.26e12};
  profile.cpu_kernel_efficiency = 0.875;
  profile.cpu_workers = 14;
  profile.handoff_per_layer_seconds = 8.5e-6;
  profile.copy_overhead_seconds = 2.6e-6;
  profile.dense_efficiency = 0.5;
  profile.dense_per_layer_seconds = 1e-5;
  profile.device_budget_bytes = (int64_t{32} << 30) + 1;
  profile.host_budget_bytes = 7;
  const auto read = ParseMachineProfile(MachineProfileToJson(profile));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(MachineProfileToJson(*read), MachineProfileToJson(profile));
  EXPECT_EQ(read->device_budget_bytes, profile.device_budget_bytes);
  EXPECT_EQ(read->rates.cpu_with_link, 94.25e9);
}

TEST(MachineProfileTest, WritesTextThatIsNoUtf8) {
  MachineProfile profile;
  profile.name = "bad \xff byte";
  EXPECT_THAT(MachineProfileToJson(profile), HasSubstr("\xef\xbf\xbd"));
}

TEST(MachineProfileTest, ErrorsNameTheField) {
  ASSERT_TRUE(ParseMachineProfile(kMinimal).ok()) << ParseMachineProfile(kMinimal).status();
  EXPECT_THAT(Error(""), HasSubstr("not a JSON object"));
  EXPECT_THAT(Error("[1, 2]"), HasSubstr("not a JSON object"));
  EXPECT_THAT(Error("{\"name\": \"x\"}"), HasSubstr("field rates is missing"));
  EXPECT_THAT(Error(Changed("\"cpu_alone_b", "\"cpu_lone_b")),
              HasSubstr("rates.cpu_alone_bytes_per_second is missing"));
  EXPECT_THAT(Error(Changed("\"name\": \"m\"", "\"name\": \"m\", \"wat\": 1")),
              HasSubstr("unknown field wat"));
  EXPECT_THAT(Error(Changed("\"name\": \"m\"", "\"name\": \"\"")), HasSubstr("name is empty"));
  EXPECT_THAT(Error(Changed("\"m\"", "7")), HasSubstr("name has to be a string"));
  EXPECT_THAT(Error(Changed(": 10,", ": \"fast\",")), HasSubstr("has to be a number"));
  EXPECT_THAT(Error(Changed(": 10,", ": -10,")), HasSubstr("cpu_alone is -10"));
  EXPECT_THAT(Error(Changed(": 8,", ": 11,")), HasSubstr("cpu_with_link is 11, above cpu_alone"));
  EXPECT_THAT(Error(Changed(": 4,", ": 6,")), HasSubstr("link_with_cpu is 6, above link_alone"));
  EXPECT_THAT(Error(Changed("\"m\"", "\"m\", \"cpu_workers\": 1.5")),
              HasSubstr("cpu_workers has to be a whole number"));
  EXPECT_THAT(Error(Changed("\"m\"", "\"m\", \"host_budget_bytes\": -1")),
              HasSubstr("host_budget_bytes"));
  EXPECT_THAT(Error(Changed("\"m\"", "\"m\", \"cpu_kernel_efficiency\": 1.2")),
              HasSubstr("cpu_kernel_efficiency is 1.2"));
  EXPECT_EQ(ReadMachineProfile("/nonexistent/profile.json").status().code(),
            absl::StatusCode::kNotFound);
}

TEST(MachineProfileTest, AttentionRatesAreWhatAKernelReaches) {
  const auto profile = ReadMachineProfile(WRITESCOPE_PROFILE_DIR "/h200-pcie5.json");
  ASSERT_TRUE(profile.ok()) << profile.status();
  const Rates rates = profile->AttentionRates(2 << 20);
  EXPECT_NEAR(rates.cpu_with_link, 94e9, 1e9);
  EXPECT_NEAR(rates.link_alone, 51.5e9, 0.5e9);
  EXPECT_NEAR(rates.link_with_cpu, 42e9, 0.5e9);
  EXPECT_LT(profile->AttentionRates(32 << 10).link_alone, 11e9) << "small pages are slow";
}

}  // namespace
}  // namespace writescope::roofline
