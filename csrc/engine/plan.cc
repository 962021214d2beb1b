#include "engine/plan.h"

#include "base/wire.h"

namespace horoplug {

PlanContents make_plan(std::span<const StepMember> step, std::span<const std::uint32_t> labels,
                       std::int64_t limit, bool fuse_groups) {
  struct Batch {
    std::uint32_t label;
    const Signature* signature;  // of its first operation
    std::int64_t bytes;
    bool open;
  };
  std::vector<Batch> batches;
  PlanContents contents;
  for (std::size_t place = 0; place < step.size(); ++place) {
    const Signature& signature = step[place].signature;
    const std::int64_t bytes = payload_bytes(signature);
    const bool apart = !fuse_groups && signature.shapes.size() > 1;
    // Into the last batch of its kind, past others: no rank that takes part in those can be waiting
    // for this one, since it had submitted all of this label before it looked at any of them.
    std::size_t at = batches.size();
    for (std::size_t i = batches.size(); i-- > 0 && !apart;) {
      if (batches[i].label != labels[place] || !fusable(*batches[i].signature, signature)) continue;
      if (batches[i].open && batches[i].bytes + bytes <= limit) at = i;
      break;
    }
    if (at == batches.size()) {
      batches.push_back({labels[place], &signature, 0, !apart});
      contents.emplace_back();
    }
    batches[at].bytes += bytes;
    contents[at].push_back(static_cast<std::uint32_t>(place));
  }
  return contents;
}

Plan::Plan(std::uint32_t epoch, std::uint64_t decided, const std::vector<StepMember>& step,
           const PlanContents& contents)
    : epoch_(epoch), decided_(decided), joined_(decided) {
  std::vector<std::size_t> batch_of(step.size(), contents.size());
  for (const auto& places : contents) {
    for (const std::uint32_t place : places) {
      if (place >= step.size() || batch_of[place] != contents.size()) {
        throw WireError("a plan with an operation that is none, or twice");
      }
      batch_of[place] = batches_.size();
    }
    batches_.push_back({places});
  }
  for (std::size_t place = 0; place < step.size(); ++place) {
    if (batch_of[place] == contents.size()) throw WireError("a plan that lacks an operation");
    places_.push_back({batch_of[place], step[place].signature});
    turns_[step[place].key].places.push_back(static_cast<std::uint32_t>(place));
  }
}

bool Plan::ready(const std::string& name, const Signature& signature) {
  const auto found = turns_.find(step_key(name, signature));
  if (found == turns_.end()) return false;
  Turn& turn = found->second;
  Place& place = places_[turn.places[turn.next]];
  if (place.ready || !compatible(place.signature, signature)) return false;
  turn.next = (turn.next + 1) % turn.places.size();
  place.ready = true;
  place.name = name;
  ++batches_[place.batch].ready;
  ++ready_;
  return true;
}

bool Plan::join_next() {
  Batch& batch = batches_[next_];
  if (running_ || !batch.complete()) return false;
  last_.clear();
  for (const std::uint32_t at : batch.places) {
    places_[at].ready = false;
    last_.push_back(places_[at].name);
  }
  ready_ -= batch.ready;
  batch.ready = 0;
  next_ = (next_ + 1) % batches_.size();
  ++joined_;
  running_ = true;
  return true;
}

}  // namespace horoplug
