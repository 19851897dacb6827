// The tile registers of AMX, as far as the attention kernel needs them: eight tiles, each of 16
// rows of 64 bytes. What a kernel takes as its `Tiles` is this or the emulator of the tests.
//
// In assembly and not by the compiler's intrinsics: those take the register's number as text, so no
// template can choose it, and g++ 12's loads do not say that they read memory.
#pragma once

#include <cstdint>

namespace writescope::kernels {
namespace {

// Operand of ldtilecfg: for each tile the bytes of a row and the number of rows.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);

// The process must have been granted the registers: DetectedCpuIsa() asks for them.
struct AmxTiles {
  // Of this thread. Release also tells the system that there is nothing to save.
  static inline void Configure(const TileConfig& config) {
    asm volatile("ldtilecfg %0" : : "m"(config));
  }
  static inline void Release() { asm volatile("tilerelease"); }

  template <int kTile>
  static inline void Zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
  }
  template <int kTile>
  static inline void Load(const void* from, int64_t stride_bytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2"
                 :
                 : "r"(from), "r"(stride_bytes), "i"(kTile)
                 : "memory");
  }
  template <int kTile>
  static inline void Store(void* to, int64_t stride_bytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)"
                 :
                 : "r"(to), "r"(stride_bytes), "i"(kTile)
                 : "memory");
  }
  // sum[m][n] += sum over k of a[m][2k] b[k][2n] + a[m][2k + 1] b[k][2n + 1]: 16 x 32 times 32
  // x 16.
  template <int kSum, int kA, int kB>
  static inline void AddProducts() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kA), "i"(kB));
  }
};

}  // namespace
}  // namespace writescope::kernels
