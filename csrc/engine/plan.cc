#include "engine/plan.h"

#include <deque>

#include "base/wire.h"

namespace horoplug {

PlanContents make_plan(std::span<const std::uint32_t> order, std::span<const std::uint32_t> labels,
                       const NameTable& table, std::int64_t limit, bool fuse_groups) {
  struct Batch {
    std::uint32_t label;
    const Signature* signature;  // of its first operation
    std::int64_t bytes;
    bool open;
  };
  std::vector<Batch> batches;
  PlanContents contents;
  for (std::size_t place = 0; place < order.size(); ++place) {
    const Signature& signature = table.at(order[place])->signature;
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
    contents[at].push_back(order[place]);
  }
  return contents;
}

Plan::Plan(std::uint32_t epoch, std::uint64_t decided, const PlanContents& contents,
           const NameTable& table)
    : epoch_(epoch), decided_(decided), joined_(decided) {
  for (const auto& ids : contents) {
    auto names = std::make_shared<std::vector<std::string>>();
    for (const std::uint32_t id : ids) {
      const NameTable::Entry* known = table.at(id);
      if (known == nullptr) throw WireError("a plan with a number that was never given");
      names->push_back(known->name);
      if (!members_.emplace(known->name, Member{batches_.size(), known->signature}).second) {
        throw WireError("a plan with an operation twice");
      }
    }
    batches_.push_back({std::move(names)});
  }
}

bool Plan::has(const std::string& name, const Signature& signature) const {
  const auto found = members_.find(name);
  return found != members_.end() && compatible(found->second.signature, signature);
}

bool Plan::ready(const std::string& name, const Signature& signature) {
  const auto found = members_.find(name);
  if (found == members_.end() || !compatible(found->second.signature, signature)) return false;
  Member& member = found->second;
  if (member.ready) return false;
  member.ready = true;
  ++batches_[member.batch].ready;
  ++ready_;
  return true;
}

Plan::Names Plan::join_next() {
  PlannedBatch& batch = batches_[next_];
  if (running_ || !batch.complete()) return nullptr;
  for (const std::string& name : *batch.names) members_.at(name).ready = false;
  ready_ -= batch.ready;
  batch.ready = 0;
  next_ = (next_ + 1) % batches_.size();
  ++joined_;
  running_ = true;
  last_ = batch.names;
  return last_;
}

}  // namespace horoplug
