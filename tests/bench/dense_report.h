// The rows of bench_cuda_dense: printed as they come, and written as a result file.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace writescope::bench {

// What nothing on this device beats, measured in the same run.
struct DeviceCeilings {
  double read_bytes_per_us = 1;
  double copy_bytes_per_us = 1;  // Reads and writes
  double product_flops_per_us = 1;
};

struct DenseRow {
  std::string kernel;   // What was timed
  std::string shape;    // The model, or the matrix
  std::string weights;  // bf16 or int4
  int tokens = 0;
  int experts = 0;   // Different ones that were chosen
  double us = 0;     // The median of one call
  double bytes = 0;  // Of the weights that it needs, each once
  double flops = 0;
};

class DenseReport {
 public:
  void SetCeilings(const DeviceCeilings& ceilings);
  void Add(const DenseRow& row);
  // False when the file cannot be written.
  bool Write(const std::string& path, const std::string& machine, const std::string& command) const;

 private:
  // Shares of the ceilings.
  double OfRead(const DenseRow& row) const;
  double OfProduct(const DenseRow& row) const;

  DeviceCeilings ceilings_;
  std::vector<DenseRow> rows_;
};

}  // namespace writescope::bench
