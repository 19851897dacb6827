#include "tests/bench/dense_report.h"

#include <cstdio>
#include <fstream>

#include "nlohmann/json.hpp"
#include "tests/bench/engine_bench/source_version.h"

namespace writescope::bench {

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
    std::printf("  %3.0f %% of read", 100 * row.bytes / row.us / ceilings_.read_bytes_per_us);
  }
  if (row.flops > 0) {
    std::printf("  %4.0f TFLOP/s, %3.0f %% of a product", row.flops / row.us / 1e6,
                100 * row.flops / row.us / ceilings_.product_flops_per_us);
  }
  std::printf("\n");
  std::fflush(stdout);
}

bool DenseReport::Write(const std::string& path, const std::string& machine,
                        const std::string& command) const {
  nlohmann::json rows = nlohmann::json::array();
  for (const DenseRow& row : rows_) {
    rows.push_back({{"kernel", row.kernel},
                    {"shape", row.shape},
                    {"weights", row.weights},
                    {"tokens", row.tokens},
                    {"experts", row.experts},
                    {"us", row.us},
                    {"bytes", static_cast<int64_t>(row.bytes)},
                    {"flops", static_cast<int64_t>(row.flops)},
                    {"of_read", row.bytes / row.us / ceilings_.read_bytes_per_us},
                    {"of_product", row.flops / row.us / ceilings_.product_flops_per_us}});
  }
  const nlohmann::json file = {{"benchmark", "dense"},
                               {"machine", machine},
                               {"commit", kCommit},
                               {"engine_hash", kEngineHash},
                               {"command", command},
                               {"ceilings",
                                {{"read_gbps", ceilings_.read_bytes_per_us / 1e3},
                                 {"copy_gbps", ceilings_.copy_bytes_per_us / 1e3},
                                 {"product_tflops", ceilings_.product_flops_per_us / 1e6}}},
                               {"rows", rows}};
  std::ofstream out(path);
  out << file.dump(1) << "\n";
  return static_cast<bool>(out);
}

}  // namespace writescope::bench
