#include "engine/roofline/machine_profile.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "absl/strings/str_cat.h"
#include "engine/base/regular_file.h"
#include "engine/base/status_macros.h"

namespace writescope::roofline {
namespace {

using Json = nlohmann::ordered_json;

// Budgets are written as JSON numbers, which are doubles: exact up to here.
constexpr double kMaxExactBytes = 9007199254740992.0;

constexpr int64_t kMaxProfileBytes = 1 << 20;

// Reads the fields of one object and remembers which it knew.
class ObjectReader {
 public:
  ObjectReader(const Json& object, std::string path) : object_(object), path_(std::move(path)) {}

  absl::Status Text(const char* key, std::string& out, bool required = false) {
    const Json* value = Find(key);
    if (value == nullptr) return required ? Missing(key) : absl::OkStatus();
    if (!value->is_string()) return Wrong(key, "a string");
    out = value->get<std::string>();
    return absl::OkStatus();
  }

  absl::Status Bool(const char* key, bool& out) {
    const Json* value = Find(key);
    if (value == nullptr) return absl::OkStatus();
    if (!value->is_boolean()) return Wrong(key, "true or false");
    out = value->get<bool>();
    return absl::OkStatus();
  }

  absl::Status Number(const char* key, double& out, bool required = false) {
    const Json* value = Find(key);
    if (value == nullptr) return required ? Missing(key) : absl::OkStatus();
    if (!value->is_number()) return Wrong(key, "a number");
    out = value->get<double>();
    return absl::OkStatus();
  }

  template <typename Integer>
  absl::Status Whole(const char* key, double max, Integer& out) {
    double number = static_cast<double>(out);
    RETURN_IF_ERROR(Number(key, number));
    if (!(number >= 0 && number <= max && number == std::floor(number))) {
      return Wrong(key, absl::StrCat("a whole number from 0 to ", max));
    }
    out = static_cast<Integer>(number);
    return absl::OkStatus();
  }

  const Json* Find(const char* key) {
    known_.insert(key);
    const auto found = object_.find(key);
    return found == object_.end() ? nullptr : &*found;
  }

  absl::Status NothingElse() const {
    for (const auto& [key, value] : object_.items()) {
      if (!known_.contains(key)) {
        return absl::InvalidArgumentError(
            absl::StrCat("machine profile: unknown field ", path_, key));
      }
    }
    return absl::OkStatus();
  }

  absl::Status Missing(const char* key) const {
    return absl::InvalidArgumentError(
        absl::StrCat("machine profile: field ", path_, key, " is missing"));
  }

  absl::Status Wrong(const char* key, const std::string& wanted) const {
    return absl::InvalidArgumentError(
        absl::StrCat("machine profile: field ", path_, key, " has to be ", wanted));
  }

 private:
  const Json& object_;
  std::string path_;
  std::set<std::string> known_;
};

absl::Status ReadRates(const Json& json, Rates& rates) {
  ObjectReader reader(json, "rates.");
  RETURN_IF_ERROR(reader.Number("cpu_alone_bytes_per_second", rates.cpu_alone, true));
  RETURN_IF_ERROR(reader.Number("cpu_with_link_bytes_per_second", rates.cpu_with_link, true));
  RETURN_IF_ERROR(reader.Number("link_alone_bytes_per_second", rates.link_alone, true));
  RETURN_IF_ERROR(reader.Number("link_with_cpu_bytes_per_second", rates.link_with_cpu, true));
  RETURN_IF_ERROR(reader.Number("device_bytes_per_second", rates.device, true));
  return reader.NothingElse();
}

absl::Status CheckPositive(const char* name, double value) {
  if (value > 0 && std::isfinite(value)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("machine profile: ", name, " is ", value, ", it has to be positive and finite"));
}

absl::Status CheckNotNegative(const char* name, double value) {
  if (value >= 0 && std::isfinite(value)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("machine profile: ", name, " is ", value,
                                                 ", it has to be at least 0 and finite"));
}

absl::Status CheckAtMost(const char* name, double value, const char* limit_name, double limit) {
  if (value <= limit) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("machine profile: ", name, " is ", value,
                                                 ", above ", limit_name, " with ", limit));
}

}  // namespace

absl::Status MachineProfile::Validate() const {
  if (name.empty()) return absl::InvalidArgumentError("machine profile: name is empty");
  RETURN_IF_ERROR(CheckPositive("cpu_alone", rates.cpu_alone));
  RETURN_IF_ERROR(CheckPositive("cpu_with_link", rates.cpu_with_link));
  RETURN_IF_ERROR(CheckPositive("link_alone", rates.link_alone));
  RETURN_IF_ERROR(CheckPositive("link_with_cpu", rates.link_with_cpu));
  RETURN_IF_ERROR(CheckPositive("device", rates.device));
  RETURN_IF_ERROR(CheckAtMost("cpu_with_link", rates.cpu_with_link, "cpu_alone", rates.cpu_alone));
  RETURN_IF_ERROR(
      CheckAtMost("link_with_cpu", rates.link_with_cpu, "link_alone", rates.link_alone));
  RETURN_IF_ERROR(CheckPositive("cpu_kernel_efficiency", cpu_kernel_efficiency));
  RETURN_IF_ERROR(CheckAtMost("cpu_kernel_efficiency", cpu_kernel_efficiency, "the limit", 1));
  RETURN_IF_ERROR(CheckPositive("dense_efficiency", dense_efficiency));
  RETURN_IF_ERROR(CheckAtMost("dense_efficiency", dense_efficiency, "the limit", 1));
  RETURN_IF_ERROR(CheckNotNegative("dense_per_layer_seconds", dense_per_layer_seconds));
  RETURN_IF_ERROR(CheckNotNegative("handoff_per_layer_seconds", handoff_per_layer_seconds));
  RETURN_IF_ERROR(CheckNotNegative("copy_overhead_seconds", copy_overhead_seconds));
  RETURN_IF_ERROR(CheckNotNegative("cpu_workers", cpu_workers));
  RETURN_IF_ERROR(
      CheckNotNegative("device_budget_bytes", static_cast<double>(device_budget_bytes)));
  return CheckNotNegative("host_budget_bytes", static_cast<double>(host_budget_bytes));
}

Rates MachineProfile::AttentionRates(double copy_bytes) const {
  Rates result = rates;
  result.cpu_alone *= cpu_kernel_efficiency;
  result.cpu_with_link *= cpu_kernel_efficiency;
  result.link_alone = LinkRateForCopies(rates.link_alone, copy_bytes, copy_overhead_seconds);
  result.link_with_cpu = LinkRateForCopies(rates.link_with_cpu, copy_bytes, copy_overhead_seconds);
  return result;
}

absl::StatusOr<MachineProfile> ParseMachineProfile(std::string_view json) {
  const Json root = Json::parse(json, nullptr, /*allow_exceptions=*/false);
  if (!root.is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat("machine profile: ", json.size(), " bytes are not a JSON object"));
  }
  MachineProfile profile;
  ObjectReader reader(root, "");
  RETURN_IF_ERROR(reader.Text("name", profile.name, true));
  RETURN_IF_ERROR(reader.Bool("measured", profile.measured));
  RETURN_IF_ERROR(reader.Text("source", profile.source));
  const Json* rates = reader.Find("rates");
  if (rates == nullptr) return reader.Missing("rates");
  if (!rates->is_object()) return reader.Wrong("rates", "an object");
  RETURN_IF_ERROR(ReadRates(*rates, profile.rates));
  RETURN_IF_ERROR(reader.Number("cpu_kernel_efficiency", profile.cpu_kernel_efficiency));
  RETURN_IF_ERROR(reader.Whole("cpu_workers", 1e6, profile.cpu_workers));
  RETURN_IF_ERROR(reader.Number("handoff_per_layer_seconds", profile.handoff_per_layer_seconds));
  RETURN_IF_ERROR(reader.Number("copy_overhead_seconds", profile.copy_overhead_seconds));
  RETURN_IF_ERROR(reader.Number("dense_efficiency", profile.dense_efficiency));
  RETURN_IF_ERROR(reader.Number("dense_per_layer_seconds", profile.dense_per_layer_seconds));
  RETURN_IF_ERROR(reader.Whole("device_budget_bytes", kMaxExactBytes, profile.device_budget_bytes));
  RETURN_IF_ERROR(reader.Whole("host_budget_bytes", kMaxExactBytes, profile.host_budget_bytes));
  RETURN_IF_ERROR(reader.NothingElse());
  RETURN_IF_ERROR(profile.Validate());
  return profile;
}

absl::StatusOr<MachineProfile> ReadMachineProfile(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadRegularFile(path, kMaxProfileBytes));
  absl::StatusOr<MachineProfile> profile = ParseMachineProfile(text);
  if (profile.ok()) return profile;
  return absl::Status(profile.status().code(),
                      absl::StrCat(path, ": ", profile.status().message()));
}

std::string MachineProfileToJson(const MachineProfile& profile) {
  Json json;
  json["name"] = profile.name;
  json["measured"] = profile.measured;
  json["source"] = profile.source;
  json["rates"] = {{"cpu_alone_bytes_per_second", profile.rates.cpu_alone},
                   {"cpu_with_link_bytes_per_second", profile.rates.cpu_with_link},
                   {"link_alone_bytes_per_second", profile.rates.link_alone},
                   {"link_with_cpu_bytes_per_second", profile.rates.link_with_cpu},
                   {"device_bytes_per_second", profile.rates.device}};
  json["cpu_kernel_efficiency"] = profile.cpu_kernel_efficiency;
  json["cpu_workers"] = profile.cpu_workers;
  json["handoff_per_layer_seconds"] = profile.handoff_per_layer_seconds;
  json["copy_overhead_seconds"] = profile.copy_overhead_seconds;
  json["dense_efficiency"] = profile.dense_efficiency;
  json["dense_per_layer_seconds"] = profile.dense_per_layer_seconds;
  json["device_budget_bytes"] = profile.device_budget_bytes;
  json["host_budget_bytes"] = profile.host_budget_bytes;
  // Text that is no UTF-8 is written with replacement characters instead of throwing.
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace writescope::roofline
