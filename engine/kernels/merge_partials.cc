#include <cmath>

#include "engine/kernels/attention_partial.h"

namespace writescope::kernels {
namespace {

void MixRow(int64_t count, float keep, float* out, float add, const float* o) {
  ActiveRowMixVariant().run(count, keep, out, add, o);
}
void MixRow(int64_t count, double keep, double* out, double add, const double* o) {
  for (int64_t d = 0; d < count; ++d) out[d] = keep * out[d] + add * o[d];
}

}  // namespace

template <typename T>
void FinishPartial(int v_dim, const T* o, T m, T l, T* out, T* lse) {
  if (l == 0) {
    for (int d = 0; d < v_dim; ++d) out[d] = 0;
    *lse = static_cast<T>(kEmptyLse);
    return;
  }
  // Divided and not multiplied by the reciprocal: where l is 1 the values come out bit for bit.
  for (int d = 0; d < v_dim; ++d) out[d] = o[d] / l;
  *lse = m + std::log2(l);
}

template <typename T>
void MergePartial(int v_dim, T* out, T* lse, const T* other_out, T other_lse) {
  if (other_lse == static_cast<T>(kEmptyLse)) return;
  if (*lse == static_cast<T>(kEmptyLse)) {
    for (int d = 0; d < v_dim; ++d) out[d] = other_out[d];
    *lse = other_lse;
    return;
  }
  const T lse_max = std::fmax(*lse, other_lse);
  const T weight = std::exp2(*lse - lse_max);
  const T other_weight = std::exp2(other_lse - lse_max);
  const T sum = weight + other_weight;  // In [1, 2]: the larger weight is 1.
  for (int d = 0; d < v_dim; ++d) {
    out[d] = (weight * out[d] + other_weight * other_out[d]) / sum;
  }
  *lse = lse_max + std::log2(sum);
}

template <typename T>
void MergeState(int v_dim, T* out, T* lse, const T* o, T m, T l) {
  if (l == 0) return;
  if (*lse == static_cast<T>(kEmptyLse)) return FinishPartial(v_dim, o, m, l, out, lse);
  // m + log2(l) is the state's lse; with the larger exponent taken out nothing overflows.
  const T state_lse = m + std::log2(l);
  const T lse_max = std::fmax(*lse, state_lse);
  const T weight = std::exp2(*lse - lse_max);
  const T state_weight = std::exp2(state_lse - lse_max);
  const T sum = weight + state_weight;
  MixRow(v_dim, weight / sum, out, state_weight / (sum * l), o);
  *lse = lse_max + std::log2(sum);
}

template <typename T>
void AddState(int v_dim, T* o, T* m, T* l, const T* other_o, T other_m, T other_l) {
  if (other_l == 0) return;
  const T m_max = std::fmax(*m, other_m);
  const T keep = *l == 0 ? T{0} : std::exp2(*m - m_max);  // Nothing seen is m = -inf, and o = 0.
  const T add = std::exp2(other_m - m_max);
  MixRow(v_dim, keep, o, add, other_o);
  *l = keep * *l + add * other_l;
  *m = m_max;
}

template void AddState<float>(int, float*, float*, float*, const float*, float, float);
template void AddState<double>(int, double*, double*, double*, const double*, double, double);
template void MergeState<float>(int, float*, float*, const float*, float, float);
template void MergeState<double>(int, double*, double*, const double*, double, double);
template void FinishPartial<float>(int, const float*, float, float, float*, float*);
template void FinishPartial<double>(int, const double*, double, double, double*, double*);
template void MergePartial<float>(int, float*, float*, const float*, float);
template void MergePartial<double>(int, double*, double*, const double*, double);

}  // namespace writescope::kernels
