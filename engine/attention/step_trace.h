// When each party of a step was at work: for a picture of it.
#pragma once

#include <vector>

namespace writescope::attention {

enum class Activity {
  kCopy,             // The link
  kCpuAttention,     // From a layer's start with the query to its last report
  kDeviceAttention,  // A call over resident blocks or landed waves
  kDense,            // From the merge of a layer to the attention of the next
  kAwaitCpu,         // The device has nothing to do but to wait for the CPU's partials
};

// Seconds on the host's steady clock.
struct TraceSpan {
  Activity activity;
  int layer = -1;  // -1: of no layer in particular
  double start_s = 0;
  double end_s = 0;
};

using StepTrace = std::vector<TraceSpan>;

}  // namespace writescope::attention
