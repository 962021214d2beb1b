// Which of the operations that are ready run together.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "controller/signature.h"

namespace horoplug {

struct ReadyOperation {
  std::string name;
  Signature signature;
  std::vector<int> absent;  // ranks that have joined (see Negotiator::join) without submitting it
};

// Takes the next batch out of `ready`: the first operation, and those after it that fit in with it
// (see fusable) as long as the batch stays within `threshold` bytes. What does not fit keeps its
// order. A threshold of 0: no fusion. `fuse_groups`: also operations on several tensors fuse.
std::vector<ReadyOperation> plan_batch(std::deque<ReadyOperation>& ready, std::int64_t threshold,
                                       bool fuse_groups = true);

}  // namespace horoplug
