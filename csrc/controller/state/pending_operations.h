// The operations that this rank has submitted to a process set and that are not decided, or whose
// batch of a plan is not done.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "controller/state/signature.h"

namespace horoplug {

class PendingOperations {
 public:
  struct Pending {
    Signature signature;
    std::uint64_t dependency_stage;  // see DependencyQuery
    std::uint64_t order;             // in order of submission
  };
  using Entry = std::pair<const std::string, Pending>;

  // The name must not be pending.
  void add(const std::string& name, const Signature& signature, std::uint64_t dependency_stage) {
    if (!operations_.emplace(name, Pending{signature, dependency_stage, ++submissions_}).second) {
      throw std::logic_error("submitted twice: " + name);
    }
  }
  // nullptr if the operation is not pending.
  const Pending* find(const std::string& name) const {
    const auto found = operations_.find(name);
    return found != operations_.end() ? &found->second : nullptr;
  }
  // Returns whether the operation was pending.
  bool erase(const std::string& name) { return operations_.erase(name) > 0; }
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
  std::unordered_map<std::string, Pending> operations_;
  std::uint64_t submissions_ = 0;
};

}  // namespace horoplug
