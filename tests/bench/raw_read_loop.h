// The loop of raw_read.h; each .cc that includes it is built for its own instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace writescope::bench {
namespace {

typedef uint64_t Line __attribute__((vector_size(64)));

inline uint64_t ReadLines(const std::byte* data, int64_t size_bytes) {
  constexpr int kUnroll = 8;
  constexpr int64_t kAheadBytes = 4096;  // Into the second cache; further was no faster.
  Line sums[kUnroll] = {};
  for (int64_t at = 0; at < size_bytes; at += kUnroll * 64) {
#pragma GCC unroll 8
    for (int i = 0; i < kUnroll; ++i) {
      __builtin_prefetch(data + at + kAheadBytes + i * 64, 0, 2);
      sums[i] += *reinterpret_cast<const Line*>(data + at + i * 64);
    }
  }
  Line sum = {};
  for (const Line& part : sums) sum += part;
  uint64_t total = 0;
  for (int i = 0; i < 8; ++i) total += sum[i];
  return total;
}

}  // namespace
}  // namespace writescope::bench
