#include "engine/kernels/kv_write.h"

#include "engine/base/bf16.h"

namespace writescope::kernels {

void WriteKey(int slot, int dim, int k_dim, KvDtype dtype, const float* values,
              std::byte* k_plane) {
  if (dtype == KvDtype::kBf16) {
    uint16_t* to = reinterpret_cast<uint16_t*>(k_plane);
    for (int d = 0; d < k_dim; ++d) {
      to[KIndex(slot, d, k_dim, 2)] = d < dim ? FloatToBf16(values[d]) : uint16_t{0};
    }
  } else {
    float* to = reinterpret_cast<float*>(k_plane);
    for (int d = 0; d < k_dim; ++d) to[KIndex(slot, d, k_dim, 1)] = d < dim ? values[d] : 0.0f;
  }
}

void WriteValue(int slot, int dim, int v_dim, KvDtype dtype, const float* values,
                std::byte* v_plane) {
  if (dtype == KvDtype::kBf16) {
    uint16_t* to = reinterpret_cast<uint16_t*>(v_plane);
    for (int d = 0; d < v_dim; ++d) {
      to[VIndex(slot, d, v_dim, 2)] = d < dim ? FloatToBf16(values[d]) : uint16_t{0};
    }
  } else {
    float* to = reinterpret_cast<float*>(v_plane);
    for (int d = 0; d < v_dim; ++d) to[VIndex(slot, d, v_dim, 1)] = d < dim ? values[d] : 0.0f;
  }
}

}  // namespace writescope::kernels
