#include "engine/tokenizer/bpe.h"

#include <algorithm>

#include "engine/base/check.h"

namespace writescope::tokenizer {
namespace {

constexpr int32_t kGone = -1;  // Symbol of a node that was merged into its left neighbour.

// Orders a max-heap so that the lowest rank, then the leftmost node, comes first.
bool ComesLater(const BpeMerges::Candidate& a, const BpeMerges::Candidate& b) {
  return a.rank != b.rank ? a.rank > b.rank : a.left > b.left;
}

}  // namespace

void BpeMerges::Add(int32_t left, int32_t right, int32_t rank, int32_t merged) {
  const auto [it, is_new] = rules_.try_emplace(Key(left, right), Rule{rank, merged});
  if (!is_new && rank < it->second.rank) it->second = Rule{rank, merged};
}

bool BpeMerges::MakeCandidate(const std::vector<Node>& nodes, int32_t left,
                              Candidate* candidate) const {
  const Node& node = nodes[static_cast<size_t>(left)];
  if (node.next < 0) return false;
  const int32_t right_symbol = nodes[static_cast<size_t>(node.next)].symbol;
  const auto rule = rules_.find(Key(node.symbol, right_symbol));
  if (rule == rules_.end()) return false;
  *candidate = {rule->second.rank, left, node.symbol, right_symbol, rule->second.merged};
  return true;
}

void BpeMerges::Apply(std::vector<int32_t>* symbols, Scratch* scratch) const {
  CHECK_LE(symbols->size(), size_t{INT32_MAX});
  const auto count = static_cast<int32_t>(symbols->size());
  std::vector<Node>& nodes = scratch->nodes;
  std::vector<Candidate>& heap = scratch->heap;
  nodes.clear();
  heap.clear();
  for (int32_t i = 0; i < count; ++i) {
    nodes.push_back({(*symbols)[static_cast<size_t>(i)], i - 1, i + 1 < count ? i + 1 : -1});
  }
  Candidate candidate;
  for (int32_t i = 0; i + 1 < count; ++i) {
    if (MakeCandidate(nodes, i, &candidate)) heap.push_back(candidate);
  }
  std::make_heap(heap.begin(), heap.end(), ComesLater);
  const auto offer = [&](int32_t left) {
    if (left < 0 || !MakeCandidate(nodes, left, &candidate)) return;
    heap.push_back(candidate);
    std::push_heap(heap.begin(), heap.end(), ComesLater);
  };
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), ComesLater);
    const Candidate best = heap.back();
    heap.pop_back();
    Node& left = nodes[static_cast<size_t>(best.left)];
    // Merges since it was offered may have changed or taken either side.
    if (left.symbol != best.left_symbol || left.next < 0) continue;
    Node& right = nodes[static_cast<size_t>(left.next)];
    if (right.symbol != best.right_symbol) continue;
    left.symbol = best.merged;
    left.next = right.next;
    right.symbol = kGone;
    if (left.next >= 0) nodes[static_cast<size_t>(left.next)].previous = best.left;
    offer(left.previous);
    offer(best.left);
  }
  symbols->clear();
  for (int32_t i = count > 0 ? 0 : -1; i >= 0; i = nodes[static_cast<size_t>(i)].next) {
    symbols->push_back(nodes[static_cast<size_t>(i)].symbol);
  }
}

}  // namespace writescope::tokenizer
