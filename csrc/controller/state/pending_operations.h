// The operations that this rank has submitted to a process set and that are not decided, or whose
// batch of a plan is not done.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

#include "controller/state/identity.h"

namespace horoplug {

class PendingOperations {
 public:
  struct Pending {
    std::uint64_t dependency_stage;  // see DependencyQuery
    std::uint64_t order;             // in order of submission
  };
  using Entry = std::pair<const IdentityPtr, Pending>;

  // The name must not be pending.
  void add(const IdentityPtr& identity, std::uint64_t dependency_stage) {
    if (!operations_.try_emplace(identity, dependency_stage, submissions_ + 1).second) {
      throw std::logic_error("submitted twice: " + identity->name);
    }
    ++submissions_;
  }
  // nullptr if the operation is not pending.
  const Entry* find(std::string_view name) const {
    const auto found = operations_.find(name);
    return found != operations_.end() ? &*found : nullptr;
  }
  // Returns whether the operation was pending.
  bool erase(const IdentityPtr& identity) { return operations_.erase(identity) > 0; }
  void clear() { operations_.clear(); }

  // In order of submission; valid until the next change.
  std::vector<const Entry*> in_order() const {
    std::vector<const Entry*> entries;
    entries.reserve(operations_.size());
    for (const Entry& entry : operations_) entries.push_back(&entry);
    std::sort(entries.begin(), entries.end(),
              [](const Entry* a, const Entry* b) { return a->second.order < b->second.order; });
    return entries;
  }

 private:
  ByName<Pending> operations_;
  std::uint64_t submissions_ = 0;
};

}  // namespace horoplug
