#include "controller/state/fusion.h"

#include <utility>

namespace horoplug {

std::vector<ReadyOperation> take_next_batch(std::deque<ReadyOperation>& ready,
                                            std::int64_t threshold, bool fuse_groups) {
  const auto stays_apart = [&](const ReadyOperation& operation) {
    return !fuse_groups && operation.signature.shapes.size() > 1;
  };
  std::vector<ReadyOperation> batch;
  batch.push_back(std::move(ready.front()));
  ready.pop_front();
  std::int64_t bytes = payload_bytes(batch.front().signature);
  std::deque<ReadyOperation> rest;
  for (auto& candidate : ready) {
    const std::int64_t more = payload_bytes(candidate.signature);
    if (bytes + more <= threshold && fusable(batch.front().signature, candidate.signature) &&
        !stays_apart(batch.front()) && !stays_apart(candidate)) {
      bytes += more;
      batch.push_back(std::move(candidate));
    } else {
      rest.push_back(std::move(candidate));
    }
  }
  ready.swap(rest);
  return batch;
}

}  // namespace horoplug
