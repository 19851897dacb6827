#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "server/cli/status.h"
#include "server/cli/streaming.h"

namespace writescope::cli {
namespace {

using ::testing::HasSubstr;

TEST(StatusText, ShowsRegionsAndBothProcessors) {
  v1::GetWorkerStateResponse state;
  state.set_worker_id("w1");
  state.set_model("demo");
  state.set_device("cpu");
  state.set_phase("serving");
  state.set_cut("meet");
  state.set_link_simulated(true);
  state.set_link_pace_bytes_per_second(2e9);
  state.mutable_share()->set_controller_id("c1");
  state.mutable_share()->set_generation(7);
  state.mutable_share()->mutable_expires_in()->set_seconds(8);
  v1::RegionState* region = state.add_regions();
  region->set_region(v1::REGION_SWING);
  region->set_capacity_bytes(8 << 20);
  region->set_used_bytes(3 << 20);
  region->set_cached_bytes(1 << 20);
  v1::StepTelemetry step;
  step.set_cpu_bytes(3 << 20);
  step.set_link_bytes(1 << 20);
  step.set_spilled_bytes(4 << 20);
  step.set_cpu_busy_seconds(0.001);
  step.set_step_seconds(0.01);
  step.set_observed_cpu_share(0.75);
  step.set_planned_cpu_share(0.7);
  step.set_batch_size(2);
  StepSummary steps;
  steps.Add(step);
  steps.Add(step);
  steps.seconds = 1;
  const std::string text = FormatStatus(state, steps);
  for (const char* part :
       {"w1, demo on cpu, serving", "controller c1, generation 7, lease ends in 8.0s",
        "share observed 0.750, planned 0.700; spilled 4.0 MiB a step; batch 2",
        "CPU    [##################......] 75% of the bytes, 3.0 MiB a step, 3.1 GB/s while busy",
        "GPU    [######..................] 25% of the bytes, 1.0 MiB streamed", "step   10.0ms",
        "2.0 steps/s, 4.0 tokens/s", "moved bytes: 0",
        "swing  [############............] 3.0 MiB of 8.0 MiB, and 1.0 MiB cached",
        "link simulated at 2.0 GB/s"}) {
    EXPECT_THAT(text, HasSubstr(part));
  }
}

TEST(StatusText, WorkerWithoutAStepOrAModel) {
  const std::string text = FormatStatus({}, {});
  EXPECT_THAT(text, HasSubstr("no model yet"));
  EXPECT_THAT(text, HasSubstr("no decode step yet"));
  EXPECT_THAT(text, HasSubstr("the worker's own roofline"));
}

TEST(ReportText, SaysWhoAttended) {
  v1::PlacementReport placement;
  placement.set_gpu_resident_tokens(10);
  placement.set_gpu_streamed_tokens(30);
  placement.set_cpu_tokens(60);
  placement.set_device_bytes(25 << 20);
  placement.set_swing_bytes(75 << 20);
  placement.set_mean_cpu_share(0.667f);
  v1::Usage usage;
  usage.set_prompt_tokens(100);
  usage.set_generated_tokens(5);
  v1::Finish finish;
  finish.set_reason(v1::FINISH_REASON_STOP_STRING);
  finish.set_stop_string("END");
  const std::string text = FormatReport(placement, usage, finish);
  EXPECT_THAT(text, HasSubstr("finished: stop_string ('END'); 100 prompt tokens"));
  EXPECT_THAT(text, HasSubstr("gpu resident 10% 10, gpu streamed 30% 30, cpu 60% 60 tokens"));
  EXPECT_THAT(text, HasSubstr("mean 0.667"));
  EXPECT_THAT(text, HasSubstr("spilled 75%"));
}

}  // namespace
}  // namespace writescope::cli
