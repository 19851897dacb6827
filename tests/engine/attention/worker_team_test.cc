#include "engine/attention/worker_team.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <latch>
#include <memory>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

namespace writescope::attention {
namespace {

struct TeamKind {
  std::string name;
  std::unique_ptr<WorkerTeam> (*create)(int num_workers);
};
void PrintTo(const TeamKind& kind, std::ostream* out) { *out << kind.name; }

class WorkerTeamTest : public ::testing::TestWithParam<TeamKind> {};

constexpr absl::Duration kLong = absl::Seconds(20);

TEST_P(WorkerTeamTest, EveryWorkerOnceAStep) {
  for (const int num_workers : {1, 2, 5}) {
    const auto team = GetParam().create(num_workers);
    EXPECT_EQ(team->num_workers(), num_workers);
    EXPECT_TRUE(team->AwaitDone(absl::ZeroDuration()));  // Nothing was started.
    std::vector<int> plain(static_cast<size_t>(num_workers), 0);
    for (int step = 1; step <= 300; ++step) {
      team->Start([&](int worker) { ++plain[static_cast<size_t>(worker)]; });
      ASSERT_TRUE(team->AwaitDone(kLong));
      for (const int times : plain) ASSERT_EQ(times, step);
    }
  }
}

TEST_P(WorkerTeamTest, AsManyAsAreAskedFor) {
  const auto team = GetParam().create(5);
  for (int step = 0; step < 300; ++step) {
    const int count = 1 + step % 5;
    std::vector<int> ran(5, 0);
    team->Start(count, [&](int worker) { ++ran[static_cast<size_t>(worker)]; });
    ASSERT_TRUE(team->AwaitDone(kLong));
    for (int worker = 0; worker < 5; ++worker) {
      ASSERT_EQ(ran[static_cast<size_t>(worker)], worker < count ? 1 : 0) << count << " workers";
    }
  }
}

TEST_P(WorkerTeamTest, AwaitDoneTimesOutWhileABodyRuns) {
  const auto team = GetParam().create(2);
  std::latch go(1);
  team->Start([&](int worker) {
    if (worker == 1) go.wait();
  });
  EXPECT_FALSE(team->AwaitDone(absl::Milliseconds(20)));
  go.count_down();
  EXPECT_TRUE(team->AwaitDone(kLong));
}

// Longer than what a clock of 64 bits of nanoseconds can add: such a wait would be none.
TEST_P(WorkerTeamTest, AWaitOfAThousandYearsEndsWithTheBodies) {
  const auto team = GetParam().create(2);
  team->Start([](int) { std::this_thread::sleep_for(std::chrono::milliseconds(20)); });
  EXPECT_TRUE(team->AwaitDone(absl::Hours(24 * 365 * 1000)));
}

// More workers than cores: each gets its turn though the others never return before it has.
TEST_P(WorkerTeamTest, PollingBodiesDoNotStarveOneAnother) {
  const auto team = GetParam().create(4);
  std::atomic<int> arrived{0};
  team->Start([&](int) {
    ++arrived;
    while (arrived < 4) std::this_thread::sleep_for(std::chrono::microseconds(50));
  });
  EXPECT_TRUE(team->AwaitDone(kLong));
  EXPECT_EQ(arrived, 4);
}

TEST_P(WorkerTeamTest, TwoTeamsDoNotMix) {
  const auto a = GetParam().create(2);
  const auto b = GetParam().create(3);
  std::atomic<int> ran_a{0};
  std::atomic<int> ran_b{0};
  for (int step = 0; step < 100; ++step) {
    a->Start([&](int) { ++ran_a; });
    b->Start([&](int) { ++ran_b; });
    ASSERT_TRUE(a->AwaitDone(kLong));
    ASSERT_TRUE(b->AwaitDone(kLong));
  }
  EXPECT_EQ(ran_a, 200);
  EXPECT_EQ(ran_b, 300);
}

TEST_P(WorkerTeamTest, EndsAfterItsBodies) {
  std::atomic<int> done{0};
  {
    const auto team = GetParam().create(3);
    team->Start([&](int) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      ++done;
    });
  }
  EXPECT_EQ(done, 3);
}

TEST_P(WorkerTeamTest, StartingTwiceEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        const auto team = GetParam().create(2);
        std::latch never(1);
        team->Start([&](int) { never.wait(); });
        team->Start([](int) {});
      },
      "workers of the last step still run");
}

const TeamKind kKinds[] = {
#if !defined(__SANITIZE_THREAD__)  // It does not see inside the packaged oneTBB.
    {"Tbb", &WorkerTeam::CreateTbb},
#endif
    {"Threads", &WorkerTeam::CreateThreads},
    {"Default", &WorkerTeam::Create},
};
INSTANTIATE_TEST_SUITE_P(Kinds, WorkerTeamTest, ::testing::ValuesIn(kKinds),
                         [](const auto& info) { return info.param.name; });

TEST(DefaultWorkers, TwoCoresAreLeftToTheRest) {
  EXPECT_EQ(DefaultWorkers(16), 14);
  EXPECT_EQ(DefaultWorkers(4), 2);  // A quota of 4 CPUs on a machine of 16
  for (const int few : {1, 2, 3}) EXPECT_EQ(DefaultWorkers(few), 1);
}

}  // namespace
}  // namespace writescope::attention
