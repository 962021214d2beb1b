// Names that all ranks know by a small integer. Every rank fills its table from the same decisions,
// in the same order.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "controller/signature.h"

namespace horoplug {

class NameTable {
 public:
  struct Entry {
    std::string name;
    Signature signature;  // as it was agreed last
  };

  std::optional<std::uint32_t> find(const std::string& name) const {
    const auto found = ids_.find(name);
    if (found == ids_.end()) return std::nullopt;
    return found->second;
  }

  // nullptr for a number that was never given.
  const Entry* at(std::uint32_t id) const { return id < entries_.size() ? &entries_[id] : nullptr; }

  // Gives a new number (the next one) or renews what is known of an old one; false if it is
  // neither.
  bool set(std::uint32_t id, const std::string& name, const Signature& signature) {
    if (id == entries_.size()) {
      if (!ids_.emplace(name, id).second) return false;
      entries_.push_back({name, signature});
      return true;
    }
    if (id > entries_.size() || entries_[id].name != name) return false;
    entries_[id].signature = signature;
    return true;
  }

  std::size_t size() const { return entries_.size(); }

 private:
  std::vector<Entry> entries_;
  std::unordered_map<std::string, std::uint32_t> ids_;
};

}  // namespace horoplug
