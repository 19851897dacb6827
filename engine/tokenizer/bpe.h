// The merging step of byte-pair encoding, shared by every kind of vocabulary here: the adjacent
// pair of lowest rank is merged first, the leftmost among equals, until none is left.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"

namespace writescope::tokenizer {

// Thread-safe once filled.
class BpeMerges {
 public:
  struct Node {
    int32_t symbol;
    int32_t previous;
    int32_t next;
  };
  struct Candidate {
    int32_t rank;
    int32_t left;  // Index of the node.
    int32_t left_symbol;
    int32_t right_symbol;
    int32_t merged;
  };
  struct Scratch {
    std::vector<Node> nodes;
    std::vector<Candidate> heap;
  };

  // Symbols are vocabulary ids or numbers behind them. A pair given twice keeps its lowest rank.
  void Add(int32_t left, int32_t right, int32_t rank, int32_t merged);

  // Merges *symbols in place; n log n.
  void Apply(std::vector<int32_t>* symbols, Scratch* scratch) const;

 private:
  struct Rule {
    int32_t rank;
    int32_t merged;
  };
  static uint64_t Key(int32_t left, int32_t right) {
    return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
  }
  // Whether the node and its right neighbour can be merged.
  bool MakeCandidate(const std::vector<Node>& nodes, int32_t left, Candidate* candidate) const;

  absl::flat_hash_map<uint64_t, Rule> rules_;
};

}  // namespace writescope::tokenizer
