// Whatever happens to blocks and sequences, each block is in one place and the sums hold.
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

#include "tests/support/cache_rig.h"
#include "tests/support/seed.h"

namespace writescope::kvcache {
namespace {

using testing::CacheRig;
using testing::CacheRigOptions;
using testing::Mix;
using testing::RandomTokens;
using testing_support::TestSeed;

// Drives a BlockTable by random calls and keeps its own books.
class LedgerModel {
 public:
  LedgerModel(uint64_t seed, CacheRig& rig) : random_(seed), table_(rig.cache().mutable_blocks()) {}

  void Step() {
    switch (random_() % 8) {
      case 0:
      case 1:
      case 2:
        Allocate();
        break;
      case 3:
        if (!held_.empty()) {
          table_.Hold(Any(held_)->first);
          ++last_->second;
        }
        break;
      case 4:
      case 5:
        if (!held_.empty()) Release(Any(held_));
        break;
      case 6:
        Retain();
        break;
      case 7:
        locked_ = !locked_;
        table_.LockRetained(locked_);
        break;
    }
  }

  void Check() {
    std::map<RegionKind, int64_t> used;
    std::set<std::pair<RegionKind, int>> places;
    for (const auto& [id, holders] : held_) {
      const BlockPlace home = table_.home(id);
      ++used[home.region];
      ASSERT_TRUE(places.insert({home.region, home.index}).second) << "two blocks in one place";
      ASSERT_EQ(table_.holders(id), holders);
      // A copy lies on the device, in a place of its own.
      const BlockPlace read = table_.read_place(id);
      if (read.region != home.region) {
        ASSERT_EQ(read.region, RegionKind::kDevice);
        ASSERT_TRUE(places.insert({read.region, read.index}).second) << "a copy over a block";
      }
    }
    for (const RegionUsage& u : table_.Usage()) {
      ASSERT_EQ(u.free + u.used + u.cached + u.retained, u.capacity);
      ASSERT_EQ(u.used, used[u.region]) << RegionName(u.region);
      ASSERT_GE(u.free, 0);
      ASSERT_GE(u.cached, 0);
      ASSERT_EQ(u.free, table_.region(u.region).free_blocks());
    }
    ASSERT_EQ(table_.moved_bytes(), 0);
  }

  void ReleaseAll() {
    while (!held_.empty()) Release(held_.begin());
    table_.LockRetained(false);
  }

 private:
  using Held = std::map<int, int>;  // Block id -> holders
  Held::iterator Any(Held& held) {
    last_ = std::next(held.begin(), static_cast<int64_t>(random_() % held.size()));
    return last_;
  }
  void Allocate() {
    const int previous = held_.empty() ? -1 : Any(held_)->first;
    bool room = false;
    for (const int64_t available : table_.Fill().available) room |= available > 0;
    const int id =
        table_.Allocate({.device_quota = {.blocks = static_cast<int64_t>(random_() % 2)}},
                        random_() % 2 == 0 ? -1 : previous);
    ASSERT_EQ(id >= 0, room) << "a block was refused though there was room";
    if (id < 0) return;
    ASSERT_EQ(held_.count(id), 0u);
    held_[id] = 1;
    if (random_() % 10 == 0) return;  // Some are given up before they are sealed.
    for (int layer = 0; layer < table_.num_layers(); ++layer) table_.CountWrite(id, layer);
    table_.Seal(id);
    if (random_() % 2 == 0) {
      table_.Index(id, PrefixIndex::kRoot,
                   std::vector<TokenId>(kBlockTokens, static_cast<TokenId>(random_() % 30)));
    }
  }
  void Release(Held::iterator it) {
    table_.Release(it->first);
    if (--it->second == 0) held_.erase(it);
  }
  void Retain() {
    if (held_.empty()) return;
    const int id = Any(held_)->first;
    if (!table_.sealed(id) || table_.read_place(id).region == RegionKind::kDevice) return;
    if (table_.BeginRetain(id, static_cast<int64_t>(random_() % 3)) < 0) return;
    table_.FinishRetain(id, random_() % 4 != 0);
  }

  std::mt19937_64 random_;
  BlockTable& table_;
  Held held_;
  Held::iterator last_;
  bool locked_ = false;
};

TEST(KvLedger, RandomOperationsOnBlocks) {
  for (uint64_t round = 0; round < 20; ++round) {
    CacheRig rig({.num_layers = 1, .blocks = {6, 5, 8, 7}, .verify = false});
    LedgerModel model(Mix(TestSeed(), round), rig);
    for (int step = 0; step < 1500; ++step) {
      model.Step();
      model.Check();
      if (::testing::Test::HasFatalFailure()) return;
    }
    model.ReleaseAll();
    ASSERT_EQ(rig.AvailableBlocks(), 26);
  }
}

// A life as the engine leads it: sequences of all kinds come, share, grow, give steps up and go.
class Soak {
 public:
  explicit Soak(uint64_t seed)
      : random_(seed),
        rig_({.num_layers = 2,
              .max_sequences = 5,
              .chunk_tokens = 256,
              .blocks = {3, 4, 5, 4},
              .host_after_spilled_blocks = 5}) {}

  void Run(int num_sequences) {
    const int64_t at_start = rig_.AvailableBlocks();
    for (int born = 0; born < num_sequences || !live_.empty();) {
      const uint64_t what = random_() % 10;
      if (born < num_sequences && (live_.empty() || what < 3)) {
        born += Birth();
      } else if (what == 3 || born == num_sequences) {
        Death(static_cast<size_t>(random_() % live_.size()));
      } else {
        Grow(live_[random_() % live_.size()], what == 9);
      }
      ASSERT_EQ(rig_.CheckLedger(), "");
      if (::testing::Test::HasFatalFailure()) return;
    }
    EXPECT_EQ(rig_.AvailableBlocks(), at_start);
    EXPECT_EQ(rig_.blocks().moved_bytes(), 0);
    EXPECT_GT(matched_, 0);
    EXPECT_GT(refused_, 0);
    EXPECT_GT(checked_, 0);
  }

 private:
  struct Live {
    int slot;
    std::vector<TokenId> prompt;
  };
  int Birth() {
    const std::vector<TokenId> prefix = RandomTokens(random_() % 4, 64 * (1 + random_() % 4));
    std::vector<TokenId> prompt = prefix;
    const std::vector<TokenId> own = RandomTokens(random_(), 1 + random_() % 150);
    prompt.insert(prompt.end(), own.begin(), own.end());
    const int64_t length = static_cast<int64_t>(prompt.size());
    const int slot = rig_.Add(length / kBlockTokens + 2);
    if (slot < 0) return 0;
    matched_ += rig_.Match(slot, prompt, length - 1);
    live_.push_back({slot, prompt});
    return 1;
  }
  void Death(size_t at) {
    // Also in the middle of a prompt, with commits under way.
    if (random_() % 4 == 0) {
      ASSERT_EQ(rig_.CheckContents(live_[at].slot), "");
      ++checked_;
    }
    rig_.Remove(live_[at].slot);
    live_.erase(live_.begin() + static_cast<int64_t>(at));
  }
  void Grow(const Live& live, bool give_up) {
    const int64_t length = rig_.cache().length(live.slot);
    std::vector<TokenId> tokens;
    const int64_t left = static_cast<int64_t>(live.prompt.size()) - length;
    if (left > 0) {
      const int64_t count = std::min<int64_t>(left, 1 + static_cast<int64_t>(random_() % 200));
      tokens.assign(live.prompt.begin() + length, live.prompt.begin() + length + count);
    } else {
      tokens = RandomTokens(random_(), 1);
    }
    int workspace_used = 0;
    const auto plan = rig_.Prepare(live.slot, static_cast<int>(tokens.size()), &workspace_used);
    if (!plan.ok()) {
      ASSERT_TRUE(absl::IsResourceExhausted(plan.status())) << plan.status();
      ASSERT_EQ(rig_.cache().length(live.slot), length);
      ++refused_;
      return;
    }
    const int layers = give_up ? static_cast<int>(random_() % 3) : 2;
    for (int layer = 0; layer < layers; ++layer) rig_.WriteLayer(*plan, tokens, layer);
    if (give_up) {
      rig_.cache().AbandonWrite(*plan);
    } else {
      rig_.Finish(*plan, tokens);
    }
    for (const int id : rig_.cache().SealedBlocks(live.slot)) {
      if (rig_.blocks().sealed(id)) {
        ASSERT_TRUE(rig_.blocks().Verify(id).ok()) << "sequence in slot " << live.slot;
      }
    }
  }

  std::mt19937_64 random_;
  CacheRig rig_;
  std::vector<Live> live_;
  int64_t matched_ = 0;
  int64_t refused_ = 0;
  int64_t checked_ = 0;
};

TEST(KvSoak, FiveHundredSequencesLeaveNothingBehind) { Soak(TestSeed()).Run(500); }

}  // namespace
}  // namespace writescope::kvcache
