// Selects the ready operations that run in one batch.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "controller/state/signature.h"

namespace horoplug {

struct ReadyOperation {
  std::string name;
  Signature signature;
  RankRanges absent;  // ranks that have joined (see Negotiator::join) and did not submit it
};

// Takes the next batch out of `ready`: the first operation, and the later ones that can be fused
// with it (see fusable) while the batch stays within `threshold` bytes. The other operations keep
// their order. A threshold of 0 disables fusion. `fuse_groups`: whether operations on several
// tensors are fused, too.
std::vector<ReadyOperation> take_next_batch(std::deque<ReadyOperation>& ready,
                                            std::int64_t threshold, bool fuse_groups = true);

}  // namespace horoplug
