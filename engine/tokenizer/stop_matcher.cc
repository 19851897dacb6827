#include "engine/tokenizer/stop_matcher.h"

#include "absl/status/status.h"
#include "engine/tokenizer/strings.h"

namespace writescope::tokenizer {

// The automaton of Aho and Corasick: its state is the longest suffix of the text that is a prefix
// of a stop string.
absl::StatusOr<StopMatcher> StopMatcher::Create(std::span<const std::string> stops) {
  StopMatcher matcher;
  matcher.nodes_.emplace_back();
  struct Edge {
    uint32_t parent;
    unsigned char byte;
    uint32_t child;
  };
  std::vector<Edge> edges;
  for (size_t i = 0; i < stops.size(); ++i) {
    if (stops[i].empty()) {
      return absl::InvalidArgumentError(Cat("stop string ", i, " is empty"));
    }
    matcher.stop_bytes_.push_back(static_cast<int>(stops[i].size()));
    uint32_t node = 0;
    for (const char c : stops[i]) {
      const auto byte = static_cast<unsigned char>(c);
      const auto next = static_cast<uint32_t>(matcher.nodes_.size());
      const auto [child, is_new] = matcher.children_.try_emplace(uint64_t{node} << 8 | byte, next);
      if (is_new) {
        edges.push_back({node, byte, next});
        matcher.nodes_.push_back({0, matcher.nodes_[node].depth + 1, -1});
      }
      node = child->second;
    }
    if (matcher.nodes_[node].stop < 0) matcher.nodes_[node].stop = static_cast<int>(i);
  }
  // Fallbacks of shorter prefixes first.
  std::vector<std::vector<Edge>> by_depth;
  for (const Edge& edge : edges) {
    const auto depth = static_cast<size_t>(matcher.nodes_[edge.child].depth);
    if (by_depth.size() <= depth) by_depth.resize(depth + 1);
    by_depth[depth].push_back(edge);
  }
  for (const std::vector<Edge>& level : by_depth) {
    for (const Edge& edge : level) {
      Node& node = matcher.nodes_[edge.child];
      if (edge.parent != 0) {
        node.fallback = matcher.Advance(matcher.nodes_[edge.parent].fallback, edge.byte);
      }
      if (node.stop < 0) node.stop = matcher.nodes_[node.fallback].stop;
    }
  }
  return matcher;
}

uint32_t StopMatcher::Advance(uint32_t node, unsigned char byte) const {
  for (;;) {
    const auto child = children_.find(uint64_t{node} << 8 | byte);
    if (child != children_.end()) return child->second;
    if (node == 0) return 0;
    node = nodes_[node].fallback;
  }
}

std::string StopMatcher::Push(std::string_view delta) {
  if (matched_stop_.has_value()) return std::string();
  size_t shown_end = 0;  // Offset in held_ up to which text may be shown.
  for (const char c : delta) {
    held_.push_back(c);
    state_ = Advance(state_, static_cast<unsigned char>(c));
    const Node& node = nodes_[state_];
    if (node.stop < 0) continue;
    matched_stop_ = node.stop;
    shown_end = held_.size() - static_cast<size_t>(stop_bytes_[static_cast<size_t>(node.stop)]);
    break;
  }
  if (!matched_stop_.has_value()) {
    shown_end = held_.size() - static_cast<size_t>(nodes_[state_].depth);
  }
  std::string shown = held_.substr(begin_, shown_end - begin_);
  begin_ = shown_end;
  if (matched_stop_.has_value()) {
    held_.clear();
    begin_ = 0;
  } else if (begin_ > held_.size() / 2) {
    // Moving what is left only when it is the smaller part keeps the sum of moves linear.
    held_.erase(0, begin_);
    begin_ = 0;
  }
  return shown;
}

std::string StopMatcher::Finish() {
  std::string rest = held_.substr(begin_);
  held_.clear();
  begin_ = 0;
  state_ = 0;
  return rest;
}

}  // namespace writescope::tokenizer
