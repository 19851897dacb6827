#include "controller/decision_log.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "engine/base/status_macros.h"

namespace writescope::controller {
namespace {

using Json = nlohmann::ordered_json;

// JSON has no NaN or infinity; -1 is no value of any field here.
double Number(double value) { return std::isfinite(value) ? value : -1; }

Json TableToJson(const roofline::ShareTable& table) {
  Json buckets = Json::array();
  for (const roofline::ShareBucket& bucket : table.buckets) {
    Json points = Json::array();
    for (const roofline::SharePoint& point : bucket.points) {
      points.push_back(Json::array({point.spilled_bytes, Number(point.share)}));
    }
    buckets.push_back(Json{{"max_batch", bucket.max_batch}, {"points", std::move(points)}});
  }
  return buckets;
}

Json InputToJson(const PolicyInput& input) {
  Json batches = Json::array();
  for (const roofline::BatchLoad& batch : input.spec.batches) {
    batches.push_back(
        Json::array({batch.max_batch, Number(batch.dense_seconds),
                     Number(batch.device_attention_seconds), Number(batch.ahead_fraction)}));
  }
  const roofline::Rates& rates = input.spec.rates;
  return Json{{"cpu_alone", Number(rates.cpu_alone)},
              {"cpu_with_link", Number(rates.cpu_with_link)},
              {"link_alone", Number(rates.link_alone)},
              {"link_with_cpu", Number(rates.link_with_cpu)},
              {"device", Number(rates.device)},
              {"batches", std::move(batches)},
              {"handoff_seconds", Number(input.spec.handoff_seconds)},
              {"min_spilled_bytes", input.spec.min_spilled_bytes},
              {"max_spilled_bytes", input.spec.max_spilled_bytes},
              {"batch_size", input.batch_size},
              {"spilled_bytes", input.spilled_bytes},
              {"min_share", Number(input.allowed.min_share)},
              {"max_share", Number(input.allowed.max_share)},
              {"lease_due", input.lease_due},
              {"num_steps_seen", input.num_steps_seen}};
}

Json DecisionFieldsToJson(const Decision& decision) {
  Json json{{"action", ActionName(decision.action)},
            {"reason", decision.reason},
            {"share", Number(decision.share)},
            {"wanted_share", Number(decision.wanted_share)},
            {"predicted_seconds", Number(decision.predicted_seconds)},
            {"predicted_wanted_seconds", Number(decision.predicted_wanted_seconds)},
            {"predicted_lowest_seconds", Number(decision.predicted_lowest_seconds)},
            {"num_clamped", decision.num_clamped},
            {"num_limited", decision.num_limited},
            {"num_guarded", decision.num_guarded}};
  if (decision.action != Action::kHold) json["table"] = TableToJson(decision.table);
  return json;
}

// Reads fields of one object; the first that is missing or of a wrong type is remembered.
class Reader {
 public:
  Reader(const Json& json, absl::Status& status) : json_(json), status_(status) {}

  template <typename T>
  void Read(const char* key, T& out) {
    const Json* value = Find(key);
    if (value == nullptr) return;
    if (!Get(*value, out)) Fail(key, "has a wrong type");
  }

  const Json* Find(const char* key) {
    const auto found = json_.find(key);
    if (found != json_.end()) return &*found;
    Fail(key, "is missing");
    return nullptr;
  }

  void Fail(const char* key, const char* what) {
    if (!status_.ok()) return;
    status_ = absl::InvalidArgumentError(absl::StrCat("decision log: field ", key, " ", what));
  }

  template <typename T>
  static bool Get(const Json& value, T& out) {
    if constexpr (std::is_same_v<T, std::string>) {
      if (!value.is_string()) return false;
    } else if constexpr (std::is_same_v<T, bool>) {
      if (!value.is_boolean()) return false;
    } else if constexpr (std::is_unsigned_v<T>) {
      if (!value.is_number_unsigned()) return false;
    } else {
      if (!value.is_number()) return false;
    }
    out = value.get<T>();
    return true;
  }

 private:
  const Json& json_;
  absl::Status& status_;
};

void ReadInput(const Json& json, PolicyInput& input, absl::Status& status) {
  Reader reader(json, status);
  reader.Read("cpu_alone", input.spec.rates.cpu_alone);
  reader.Read("cpu_with_link", input.spec.rates.cpu_with_link);
  reader.Read("link_alone", input.spec.rates.link_alone);
  reader.Read("link_with_cpu", input.spec.rates.link_with_cpu);
  reader.Read("device", input.spec.rates.device);
  reader.Read("handoff_seconds", input.spec.handoff_seconds);
  reader.Read("min_spilled_bytes", input.spec.min_spilled_bytes);
  reader.Read("max_spilled_bytes", input.spec.max_spilled_bytes);
  reader.Read("batch_size", input.batch_size);
  reader.Read("spilled_bytes", input.spilled_bytes);
  reader.Read("min_share", input.allowed.min_share);
  reader.Read("max_share", input.allowed.max_share);
  reader.Read("lease_due", input.lease_due);
  reader.Read("num_steps_seen", input.num_steps_seen);
  const Json* batches = reader.Find("batches");
  if (batches == nullptr) return;
  for (const Json& batch : *batches) {
    roofline::BatchLoad load;
    if (!batch.is_array() || batch.size() != 4 || !Reader::Get(batch[0], load.max_batch) ||
        !Reader::Get(batch[1], load.dense_seconds) ||
        !Reader::Get(batch[2], load.device_attention_seconds) ||
        !Reader::Get(batch[3], load.ahead_fraction)) {
      reader.Fail("batches", "has an entry that is not four numbers");
      return;
    }
    input.spec.batches.push_back(load);
  }
}

void ReadTable(const Json& buckets, roofline::ShareTable& table, Reader& reader) {
  for (const Json& bucket_json : buckets) {
    roofline::ShareBucket bucket;
    if (!bucket_json.is_object() || !bucket_json.contains("max_batch") ||
        !Reader::Get(bucket_json["max_batch"], bucket.max_batch) ||
        !bucket_json.contains("points")) {
      return reader.Fail("table", "has a bucket without max_batch or points");
    }
    for (const Json& point_json : bucket_json["points"]) {
      roofline::SharePoint point;
      if (!point_json.is_array() || point_json.size() != 2 ||
          !Reader::Get(point_json[0], point.spilled_bytes) ||
          !Reader::Get(point_json[1], point.share)) {
        return reader.Fail("table", "has a point that is not two numbers");
      }
      bucket.points.push_back(point);
    }
    table.buckets.push_back(std::move(bucket));
  }
}

void ReadDecision(const Json& json, Decision& decision, absl::Status& status) {
  Reader reader(json, status);
  std::string action;
  reader.Read("action", action);
  if (action == "push") {
    decision.action = Action::kPush;
  } else if (action == "renew") {
    decision.action = Action::kRenew;
  } else if (action != "hold") {
    reader.Fail("action", "is none of push, renew, hold");
  }
  reader.Read("reason", decision.reason);
  reader.Read("share", decision.share);
  reader.Read("wanted_share", decision.wanted_share);
  reader.Read("predicted_seconds", decision.predicted_seconds);
  reader.Read("predicted_wanted_seconds", decision.predicted_wanted_seconds);
  reader.Read("predicted_lowest_seconds", decision.predicted_lowest_seconds);
  reader.Read("num_clamped", decision.num_clamped);
  reader.Read("num_limited", decision.num_limited);
  reader.Read("num_guarded", decision.num_guarded);
  if (json.contains("table")) ReadTable(json["table"], decision.table, reader);
}

}  // namespace

std::string DecisionToJson(const DecisionRecord& record) {
  Json json{{"time", absl::FormatTime(absl::RFC3339_full, record.time, absl::UTCTimeZone())},
            {"controller_id", record.controller_id},
            {"worker_id", record.worker_id},
            {"shadow", record.shadow},
            {"meet", record.meet},
            {"measured_step_seconds", Number(record.measured_step_seconds)},
            {"observed_share", Number(record.observed_share)},
            {"outcome", record.outcome},
            {"generation", record.generation},
            {"input", InputToJson(record.input)},
            {"decision", DecisionFieldsToJson(record.decision)}};
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

absl::StatusOr<DecisionRecord> DecisionFromJson(std::string_view line) {
  const Json json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat("decision log: a line of ", line.size(), " bytes is not a JSON object"));
  }
  DecisionRecord record;
  absl::Status status;
  Reader reader(json, status);
  std::string time;
  reader.Read("time", time);
  std::string error;
  if (status.ok() && !absl::ParseTime(absl::RFC3339_full, time, &record.time, &error)) {
    reader.Fail("time", "is not RFC 3339");
  }
  reader.Read("controller_id", record.controller_id);
  reader.Read("worker_id", record.worker_id);
  reader.Read("shadow", record.shadow);
  reader.Read("meet", record.meet);
  reader.Read("measured_step_seconds", record.measured_step_seconds);
  reader.Read("observed_share", record.observed_share);
  reader.Read("outcome", record.outcome);
  reader.Read("generation", record.generation);
  if (const Json* input = reader.Find("input")) ReadInput(*input, record.input, status);
  if (const Json* decision = reader.Find("decision"))
    ReadDecision(*decision, record.decision, status);
  RETURN_IF_ERROR(status);
  return record;
}

absl::StatusOr<std::unique_ptr<DecisionLog>> DecisionLog::Create(const std::string& path,
                                                                 int64_t max_bytes) {
  if (max_bytes < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("decision log: a limit of ", max_bytes, " bytes leaves no room"));
  }
  std::unique_ptr<DecisionLog> log(new DecisionLog(path, max_bytes));
  RETURN_IF_ERROR(log->Open());
  return log;
}

absl::Status DecisionLog::Open() {
  // Without O_NONBLOCK a FIFO would hold the control loop up until somebody reads it.
  const int fd = open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK, 0666);
  if (fd < 0) {
    return absl::UnavailableError(
        absl::StrCat("decision log ", path_, " cannot be opened: ", std::strerror(errno)));
  }
  struct stat info = {};
  if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    close(fd);
    return absl::UnavailableError(absl::StrCat(
        "decision log ", path_, " is not a regular file, which it has to be to start anew"));
  }
  file_.reset(fdopen(fd, "a"));
  if (file_ == nullptr) {
    close(fd);
    return absl::UnavailableError(
        absl::StrCat("decision log ", path_, " cannot be written to: ", std::strerror(errno)));
  }
  std::fseek(file_.get(), 0, SEEK_END);
  size_bytes_ = std::max<int64_t>(std::ftell(file_.get()), 0);
  return absl::OkStatus();
}

absl::Status DecisionLog::Append(const DecisionRecord& record) {
  const std::string line = DecisionToJson(record) + "\n";
  if (file_ != nullptr && size_bytes_ > 0 &&
      size_bytes_ + static_cast<int64_t>(line.size()) > max_bytes_) {
    file_.reset();
    if (std::rename(path_.c_str(), absl::StrCat(path_, ".1").c_str()) != 0) {
      return absl::UnavailableError(
          absl::StrCat("decision log ", path_, " cannot be moved aside: ", std::strerror(errno)));
    }
  }
  if (file_ == nullptr) RETURN_IF_ERROR(Open());
  if (std::fwrite(line.data(), 1, line.size(), file_.get()) != line.size() ||
      std::fflush(file_.get()) != 0) {
    return absl::UnavailableError(absl::StrCat("decision log ", path_, ": ", line.size(),
                                               " bytes were not written: ", std::strerror(errno)));
  }
  size_bytes_ += static_cast<int64_t>(line.size());
  return absl::OkStatus();
}

}  // namespace writescope::controller
