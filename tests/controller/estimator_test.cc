#include "controller/estimator.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "tests/support/seed.h"

namespace writescope::controller {
namespace {

// 10 ms dense, then 100 ms in which both work at 90 and 40 GB/s; the link streams ahead at 50.
StepSample Sample() {
  StepSample s;
  s.step_seconds = 0.11;
  s.batch_size = 8;
  s.cpu_bytes = s.cpu_bytes_both_busy = 9000000000;
  s.link_bytes_both_busy = 4000000000;
  s.link_bytes = 4500000000;
  s.spilled_bytes = s.cpu_bytes + s.link_bytes;
  s.resident_bytes = 10000000000;
  s.cpu_busy_seconds = 0.1;
  s.link_busy_seconds = 0.11;
  s.both_busy_seconds = 0.1;
  s.dense_seconds = 0.01;
  s.device_attention_seconds = 0.0145;
  return s;
}

// The same, but the link has nothing to do in the second half of the CPU's work.
StepSample CpuBesideAnIdleLink() {
  StepSample s = Sample();
  s.both_busy_seconds = s.link_busy_seconds = 0.05;
  s.link_bytes = s.link_bytes_both_busy = 2000000000;
  s.cpu_bytes_both_busy = 4500000000;
  s.spilled_bytes = s.cpu_bytes + s.link_bytes;
  return s;
}

// That knows the rates of Sample().
Estimator SeededEstimator() {
  Estimator estimator;
  estimator.Seed({90e9, 90e9, 50e9, 40e9, 0});
  return estimator;
}

TEST(EstimatorTest, RatesAreRatios) {
  Estimator estimator;
  estimator.Seed({200e9, 100e9, 100e9, 80e9, 5e12});  // Contention 0.5 and 0.8.
  EXPECT_EQ(estimator.Add(Sample()), Estimator::Verdict::kUsed);
  const roofline::Rates rates = estimator.rates();
  EXPECT_NEAR(rates.cpu_with_link, 90e9, 1e6);
  EXPECT_NEAR(rates.cpu_alone, 180e9, 1e6) << "never seen alone: the profile's ratio";
  // 4.5 GB = with * 0.1 s + with / 0.8 * 0.01 s.
  EXPECT_NEAR(rates.link_with_cpu, 4.5e9 / 0.1125, 1e6);
  EXPECT_NEAR(rates.device, 1e12, 1e9);
  EXPECT_EQ(estimator.num_used(), 1u);
}

TEST(EstimatorTest, ContentionIsMeasuredWhereBothPartsAreSeen) {
  Estimator estimator;
  // Half the CPU's time alone, at 120 GB/s instead of 90.
  StepSample s = CpuBesideAnIdleLink();
  s.cpu_bytes = 4500000000 + 6000000000;
  s.spilled_bytes = s.cpu_bytes + s.link_bytes;
  for (int i = 0; i < 5; ++i) estimator.Add(s);
  EXPECT_NEAR(estimator.rates().cpu_with_link, 90e9, 1e6);
  EXPECT_NEAR(estimator.rates().cpu_alone, 120e9, 1e6);
}

TEST(EstimatorTest, ASlowerCpuAloneSlowsBothRates) {
  Estimator estimator;
  estimator.Seed({100e9, 80e9, 50e9, 40e9, 0});
  StepSample s = Sample();
  s.link_bytes = s.link_bytes_both_busy = 0;
  s.link_busy_seconds = s.both_busy_seconds = 0;
  s.cpu_bytes_both_busy = 0;
  s.cpu_bytes = s.spilled_bytes = 5000000000;  // 50 GB/s alone.
  estimator.Add(s);
  EXPECT_NEAR(estimator.rates().cpu_alone, 50e9, 1e6);
  EXPECT_NEAR(estimator.rates().cpu_with_link, 40e9, 1e6);
}

TEST(EstimatorTest, DenseTimePerBatch) {
  Estimator estimator;
  EXPECT_EQ(estimator.DenseSeconds(8), 0);
  StepSample s = Sample();
  s.batch_size = 4;
  s.dense_seconds = 0.010;
  estimator.Add(s);
  EXPECT_DOUBLE_EQ(estimator.DenseSeconds(4), 0.010);
  EXPECT_DOUBLE_EQ(estimator.DenseSeconds(3), 0.010) << "one bucket with 4";
  EXPECT_DOUBLE_EQ(estimator.DenseSeconds(1), 0.010) << "the nearest that is known";
  EXPECT_DOUBLE_EQ(estimator.DenseSeconds(5000), 0.010);
  s.batch_size = 64;
  s.dense_seconds = 0.018;
  estimator.Add(s);
  EXPECT_NEAR(estimator.DenseSeconds(16), 0.014, 1e-12) << "half way in powers of two";
  EXPECT_DOUBLE_EQ(estimator.DenseSeconds(3), 0.010);
  EXPECT_NEAR(estimator.DenseSeconds(5), 0.012, 1e-12) << "one bucket with 8";
  EXPECT_DOUBLE_EQ(estimator.DenseSeconds(33), 0.018) << "one bucket with 64";
  const auto loads = estimator.BatchLoads(100, 5000000000);
  ASSERT_EQ(loads.size(), 8u);
  EXPECT_EQ(loads.front().max_batch, 1u);
  EXPECT_EQ(loads.back().max_batch, 128u);
  EXPECT_NEAR(loads[4].dense_seconds, 0.014, 1e-12);
  EXPECT_NEAR(loads[4].device_attention_seconds, 0.005, 1e-4);
}

TEST(EstimatorTest, StepsWithNothingSpilledSayWhatDenseIs) {
  Estimator estimator;
  StepSample s = Sample();
  s.spilled_bytes = s.cpu_bytes = s.link_bytes = 0;
  s.cpu_bytes_both_busy = s.link_bytes_both_busy = 0;
  s.cpu_busy_seconds = s.link_busy_seconds = s.both_busy_seconds = 0;
  s.device_attention_seconds = 0.010;
  EXPECT_EQ(estimator.Add(s), Estimator::Verdict::kNothingSpilled);
  EXPECT_DOUBLE_EQ(estimator.DenseSeconds(8), 0.010);
  EXPECT_NEAR(estimator.rates().device, 1e12, 1e6);
}

TEST(EstimatorTest, PrefillChunksDoNotLengthenDense) {
  StepSample first = Sample();
  first.prefill_tokens = 512;
  first.dense_seconds = 0.05;
  Estimator begun;
  begun.Add(first);
  EXPECT_DOUBLE_EQ(begun.DenseSeconds(8), 0.05) << "better than nothing";
  Estimator estimator;
  for (int i = 0; i < 5; ++i) estimator.Add(Sample());
  StepSample s = Sample();
  s.prefill_tokens = 512;
  s.dense_seconds = 0.1;
  for (int i = 0; i < 50; ++i) estimator.Add(s);
  EXPECT_NEAR(estimator.DenseSeconds(8), 0.010, 1e-6);
}

TEST(EstimatorTest, WithoutAQueryDenseIsAnUpperLimit) {
  Estimator estimator;
  StepSample s = Sample();
  s.cpu_bytes = s.cpu_bytes_both_busy = 0;
  s.cpu_busy_seconds = s.both_busy_seconds = 0;
  s.link_bytes_both_busy = 0;
  s.dense_seconds = 0.1;  // Mostly spent waiting for the link.
  estimator.Add(s);
  EXPECT_EQ(estimator.DenseSeconds(8), 0);
  for (int i = 0; i < 5; ++i) estimator.Add(Sample());
  for (int i = 0; i < 50; ++i) estimator.Add(s);
  EXPECT_NEAR(estimator.DenseSeconds(8), 0.010, 1e-6);
  s.dense_seconds = 0.004;
  for (int i = 0; i < 50; ++i) estimator.Add(s);
  EXPECT_NEAR(estimator.DenseSeconds(8), 0.004, 1e-6);
}

TEST(EstimatorTest, AheadFractionSeesASmallRing) {
  Estimator estimator = SeededEstimator();
  EXPECT_EQ(estimator.AheadFraction(), 1);
  for (int i = 0; i < 5; ++i) estimator.Add(Sample());
  EXPECT_NEAR(estimator.AheadFraction(), 1, 1e-6);
  // The link was busy for 2 ms of the 10 only.
  Estimator limited = SeededEstimator();
  StepSample s = Sample();
  s.link_busy_seconds = 0.102;
  s.link_bytes = 4100000000;
  s.spilled_bytes = s.cpu_bytes + s.link_bytes;
  for (int i = 0; i < 5; ++i) limited.Add(s);
  EXPECT_NEAR(limited.AheadFraction(), 0.2, 1e-3);
  // A CPU that is busy beside an idle link says that it has too much: the belief gives way.
  for (int i = 0; i < 200; ++i) limited.Add(CpuBesideAnIdleLink());
  EXPECT_EQ(limited.AheadFraction(), 1);
}

TEST(EstimatorTest, ALinkThatRanOutOfWorkSaysNothingOfTheRing) {
  Estimator estimator = SeededEstimator();
  StepSample s = Sample();
  s.link_bytes = 100000000;  // 2 ms of the 10, and nothing after them.
  s.link_bytes_both_busy = 0;
  s.spilled_bytes = s.cpu_bytes + s.link_bytes;
  s.link_busy_seconds = 0.002;
  s.both_busy_seconds = 0;
  s.cpu_bytes_both_busy = 0;
  s.cpu_busy_seconds = 0.002;
  s.cpu_bytes = 180000000;
  for (int i = 0; i < 5; ++i) estimator.Add(s);
  EXPECT_EQ(estimator.AheadFraction(), 1);
}

TEST(EstimatorTest, NoBeliefGoesBeyondAllOfDense) {
  Estimator estimator = SeededEstimator();
  for (int i = 0; i < 5; ++i) estimator.Add(Sample());
  for (int i = 0; i < 500; ++i) estimator.Add(CpuBesideAnIdleLink());
  EXPECT_EQ(estimator.AheadFraction(), 1);
  // What a small ring says is believed as soon as it would have been before.
  StepSample small = Sample();
  small.link_busy_seconds = 0.105;
  small.link_bytes = 4250000000;
  small.spilled_bytes = small.cpu_bytes + small.link_bytes;
  estimator.Add(small);
  EXPECT_LT(estimator.AheadFraction(), 0.99);
}

TEST(EstimatorTest, ChangesAreCountedBySide) {
  Estimator estimator;
  for (int i = 0; i < 20; ++i) estimator.Add(Sample());
  EXPECT_EQ(estimator.cpu_changes(), 0u);
  EXPECT_EQ(estimator.link_changes(), 0u);
  StepSample s = Sample();
  s.cpu_bytes = s.cpu_bytes_both_busy = s.cpu_bytes / 3;
  for (int i = 0; i < 10; ++i) estimator.Add(s);
  EXPECT_EQ(estimator.cpu_changes(), 1u);
  EXPECT_EQ(estimator.link_changes(), 0u);
}

TEST(EstimatorTest, ASeedWithOneRateOnlyHoldsForBoth) {
  Estimator estimator;
  estimator.Seed({100e9, 0, 50e9, 0, 0});
  EXPECT_EQ(estimator.rates().cpu_alone, 100e9);
  EXPECT_EQ(estimator.rates().cpu_with_link, 100e9);
  EXPECT_EQ(estimator.rates().link_with_cpu, 50e9);
  // No measurement is right in which sharing memory costs nearly all.
  Estimator odd;
  odd.Seed({100e9, 1e9, 50e9, 40e9, 0});
  EXPECT_NEAR(odd.rates().cpu_alone, 5e9, 1);
}

TEST(EstimatorTest, ADeviceThatIsTheBottleneckSaysNothingOfTheRing) {
  Estimator estimator = SeededEstimator();
  StepSample s = Sample();
  s.link_busy_seconds = 0.102;
  s.link_bytes = 4100000000;
  s.spilled_bytes = s.cpu_bytes + s.link_bytes;
  s.device_attention_seconds = 0.09;  // Of the 100 ms
  for (int i = 0; i < 5; ++i) estimator.Add(s);
  EXPECT_EQ(estimator.AheadFraction(), 1);
}

TEST(EstimatorTest, NamesWhatItDoesNotUse) {
  Estimator estimator;
  StepSample s = Sample();
  s.kind = StepKind::kPrefill;
  EXPECT_EQ(estimator.Add(s), Estimator::Verdict::kNotDecode);
  s = Sample();
  s.spilled_bytes = s.cpu_bytes = s.link_bytes = 0;
  s.cpu_bytes_both_busy = s.link_bytes_both_busy = 0;
  EXPECT_EQ(estimator.Add(s), Estimator::Verdict::kNothingSpilled);
  const auto garbage = [&](auto&& change) {
    StepSample sample = Sample();
    change(sample);
    return estimator.Add(sample) == Estimator::Verdict::kGarbage;
  };
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_TRUE(garbage([](StepSample& x) { x.step_seconds = kNan; }));
  EXPECT_TRUE(garbage([](StepSample& x) { x.step_seconds = 0; }));
  EXPECT_TRUE(garbage([](StepSample& x) { x.dense_seconds = -1; }));
  EXPECT_TRUE(garbage([](StepSample& x) { x.cpu_busy_seconds = 5; }));
  EXPECT_TRUE(garbage([](StepSample& x) { x.both_busy_seconds = 0.109; }));
  EXPECT_TRUE(garbage([](StepSample& x) { x.cpu_bytes_both_busy = x.cpu_bytes + 1; }));
  EXPECT_TRUE(garbage([](StepSample& x) { x.link_bytes_both_busy = x.link_bytes + 1; }));
  EXPECT_TRUE(garbage([](StepSample& x) { x.dense_seconds = 0.12; }));
  EXPECT_TRUE(garbage([](StepSample& x) { x.step_seconds = 4000; }));
  EXPECT_TRUE(garbage([](StepSample& x) { x.link_bytes = uint64_t{1} << 51; }));
  EXPECT_TRUE(garbage([](StepSample& x) { x.resident_bytes = uint64_t{1} << 51; }));
  EXPECT_TRUE(garbage([](StepSample& x) { x.batch_size = 0; }));
  EXPECT_TRUE(garbage([](StepSample& x) { x.spilled_bytes = ~uint64_t{0}; }));
  EXPECT_EQ(estimator.num_used(), 0u);
}

TEST(EstimatorTest, TinySamplesSayNothingOfRates) {
  Estimator estimator;
  estimator.Seed({100e9, 80e9, 50e9, 40e9, 0});
  StepSample s = Sample();
  s.cpu_bytes = s.cpu_bytes_both_busy = 100;
  s.link_bytes = s.link_bytes_both_busy = 100;
  s.spilled_bytes = 200;
  s.cpu_busy_seconds = s.link_busy_seconds = s.both_busy_seconds = 1e-6;
  EXPECT_EQ(estimator.Add(s), Estimator::Verdict::kUsed);
  EXPECT_NEAR(estimator.rates().cpu_with_link, 80e9, 1);
}

// Any bits at all.
TEST(EstimatorTest, TotalForAnyTelemetry) {
  std::mt19937_64 rng(testing_support::TestSeed());
  const auto any_double = [&]() -> double {
    const double odd[] = {std::numeric_limits<double>::quiet_NaN(),
                          std::numeric_limits<double>::infinity(),
                          -1,
                          0,
                          1e-320,
                          1e308,
                          std::pow(10, std::uniform_real_distribution<double>(-9, 3)(rng))};
    return odd[rng() % std::size(odd)];
  };
  for (int round = 0; round < 50; ++round) {
    Estimator estimator;
    estimator.Seed({any_double(), any_double(), any_double(), any_double(), any_double()});
    for (int i = 0; i < 500; ++i) {
      StepSample s;
      s.step_seconds = any_double();
      s.batch_size = static_cast<uint32_t>(rng() >> (32 + rng() % 32));
      s.prefill_tokens = rng() % 2 == 0 ? 0 : 512;
      s.spilled_bytes = rng() >> (rng() % 64);
      s.cpu_bytes = rng() >> (rng() % 64);
      s.link_bytes = rng() >> (rng() % 64);
      s.resident_bytes = rng() >> (rng() % 64);
      s.cpu_bytes_both_busy = rng() >> (rng() % 64);
      s.link_bytes_both_busy = rng() >> (rng() % 64);
      s.cpu_busy_seconds = any_double();
      s.link_busy_seconds = any_double();
      s.both_busy_seconds = any_double();
      s.dense_seconds = any_double();
      s.device_attention_seconds = any_double();
      estimator.Add(s);
    }
    const roofline::Rates rates = estimator.rates();
    for (const double rate : {rates.cpu_alone, rates.cpu_with_link, rates.link_alone,
                              rates.link_with_cpu, rates.device, estimator.DenseSeconds(7),
                              estimator.AheadFraction(), estimator.ResidentSeconds(1 << 30)}) {
      ASSERT_TRUE(std::isfinite(rate) && rate >= 0) << rate;
    }
    ASSERT_LE(estimator.AheadFraction(), 1);
  }
}

}  // namespace
}  // namespace writescope::controller
