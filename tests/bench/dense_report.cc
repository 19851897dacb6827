#include "tests/bench/dense_report.h"

#include <cmath>
#include <cstdio>
#include <fstream>

#include "nlohmann/json.hpp"
#include "tests/bench/engine_bench/source_version.h"

namespace writescope::bench {
namespace {

// To whole parts of a `parts`-th.
double Rounded(double value, int parts) { return std::round(value * parts) / parts; }

}  // namespace

void DenseReport::SetCeilings(const DeviceCeilings& ceilings) {
  ceilings_ = ceilings;
  std::printf("device: read %.2f TB/s, copy %.2f TB/s (reads and writes), product %.0f TFLOP/s\n",
              ceilings.read_bytes_per_us / 1e6, ceilings.copy_bytes_per_us / 1e6,
              ceilings.product_flops_per_us / 1e6);
}

void DenseReport::Add(const DenseRow& row) {
  rows_.push_back(row);
  std::printf("%-17s %-4s %4d tokens  %-22s %8.1f us", row.shape.c_str(), row.weights.c_str(),
              row.tokens, row.kernel.c_str(), row.us);
  if (row.bytes > 0) {
    std::printf("  %3.0f %% of read", 100 * OfRead(row));
  }
  if (row.flops > 0) {
    std::printf("  %4.0f TFLOP/s, %3.0f %% of a product", row.flops / row.us / 1e6,
                100 * OfProduct(row));
  }
  std::printf("\n");
  std::fflush(stdout);
}

bool DenseReport::Write(const std::string& path, const std::string& machine,
                        const std::string& command) const {
  const nlohmann::json head = {{"benchmark", "dense"},
                               {"machine", machine},
                               {"commit", kCommit},
                               {"engine_hash", kEngineHash},
                               {"command", command},
                               {"ceilings",
                                {{"read_gbps", ceilings_.read_bytes_per_us / 1e3},
                                 {"copy_gbps", ceilings_.copy_bytes_per_us / 1e3},
                                 {"product_tflops", ceilings_.product_flops_per_us / 1e6}}}};
  std::ofstream out(path);
  out << "{\n";
  for (const auto& [key, value] : head.items()) {
    out << ' ' << nlohmann::json(key) << ": " << value << ",\n";
  }
  // There are hundreds of rows: a line each.
  out << " \"rows\": [";
  for (const DenseRow& row : rows_) {
    const nlohmann::json line = {{"kernel", row.kernel},
                                 {"shape", row.shape},
                                 {"weights", row.weights},
                                 {"tokens", row.tokens},
                                 {"experts", row.experts},
                                 {"us", Rounded(row.us, 100)},
                                 {"bytes", static_cast<int64_t>(row.bytes)},
                                 {"flops", static_cast<int64_t>(row.flops)},
                                 {"of_read", Rounded(OfRead(row), 1000)},
                                 {"of_product", Rounded(OfProduct(row), 1000)}};
    out << (&row == rows_.data() ? "\n  " : ",\n  ") << line;
  }
  out << "\n ]\n}\n";
  return static_cast<bool>(out);
}

double DenseReport::OfRead(const DenseRow& row) const {
  return row.bytes / row.us / ceilings_.read_bytes_per_us;
}
double DenseReport::OfProduct(const DenseRow& row) const {
  return row.flops / row.us / ceilings_.product_flops_per_us;
}

}  // namespace writescope::bench
