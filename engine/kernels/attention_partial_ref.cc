// The scalar twin: what right means for attention_partial.h. It reads the tiles by the index maps
// of tile_layout.h and by nothing else.
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "engine/base/bf16.h"
#include "engine/base/check.h"
#include "engine/kernels/attention_partial.h"

namespace writescope::kernels {
namespace {

double ReadValue(const std::byte* plane, int64_t index, KvDtype dtype) {
  if (dtype == KvDtype::kBf16) {
    uint16_t bits;
    std::memcpy(&bits, plane + 2 * index, sizeof(bits));
    return Bf16ToFloat(bits);
  }
  float value;
  std::memcpy(&value, plane + 4 * index, sizeof(value));
  return value;
}

double KeyValue(const AttentionPartialArgsT<double>& args, const KvHeadBlock& block, int token,
                int dim) {
  return ReadValue(block.k, KIndex(token, dim, args.k_dim, KvWordValues(args.dtype)), args.dtype);
}

double Value(const AttentionPartialArgsT<double>& args, const KvHeadBlock& block, int token,
             int dim) {
  if (args.value_in_key) return KeyValue(args, block, token, dim);
  return ReadValue(block.v, VIndex(token, dim, args.v_dim, KvWordValues(args.dtype)), args.dtype);
}

bool Sees(const AttentionPartialArgsT<double>& args, const KvHeadBlock& block, int row, int token) {
  return args.visible == nullptr || block.first_position + token < args.visible[row];
}

void AttendRow(const AttentionPartialArgsT<double>& args, int row) {
  std::vector<KvHeadBlock> blocks;
  for (size_t i = 0; i < args.blocks.size(); ++i) {
    if (static_cast<int>(i) % args.num_heads == row / args.num_rows) {
      blocks.push_back(args.blocks[i]);
    }
  }
  std::vector<double> scores;
  double maximum = *args.m[row];
  for (const KvHeadBlock& block : blocks) {
    for (int t = 0; t < block.num_tokens; ++t) {
      if (!Sees(args, block, row, t)) continue;
      double score = 0;
      for (int d = 0; d < args.k_dim; ++d) {
        score += static_cast<double>(args.q[row][d]) * KeyValue(args, block, t, d);
      }
      scores.push_back(score);
      maximum = score > maximum ? score : maximum;
    }
  }
  if (scores.empty()) return;
  // Where nothing above -inf was seen all weights are 0, unless a score is NaN.
  const double base = std::isinf(maximum) && maximum < 0 ? 0 : maximum;
  const double factor = std::exp2(*args.m[row] - base);
  *args.l[row] *= factor;
  for (int d = 0; d < args.v_dim; ++d) args.o[row][d] *= factor;
  size_t next = 0;
  for (const KvHeadBlock& block : blocks) {
    for (int t = 0; t < block.num_tokens; ++t) {
      if (!Sees(args, block, row, t)) continue;
      const double weight = std::exp2(scores[next++] - base);
      *args.l[row] += weight;
      for (int d = 0; d < args.v_dim; ++d) {
        args.o[row][d] += weight * Value(args, block, t, d);
      }
    }
  }
  *args.m[row] = maximum;
}

}  // namespace

void AttentionPartialRef(const AttentionPartialArgsT<double>& args) {
  for (int row = 0; row < args.num_heads * args.num_rows; ++row) AttendRow(args, row);
}

}  // namespace writescope::kernels
