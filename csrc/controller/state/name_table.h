// Names that all ranks know by a small integer, the id. Every rank fills its table from the same
// decisions in the same order, so ids agree.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "controller/state/signature.h"

namespace horoplug {

class NameTable {
 public:
  struct Entry {
    std::string name;
    Signature signature;  // as agreed on last
  };

  std::optional<std::uint32_t> find(const std::string& name) const {
    const auto found = ids_.find(name);
    if (found == ids_.end()) return std::nullopt;
    return found->second;
  }

  // nullptr if the id was never assigned.
  const Entry* at(std::uint32_t id) const { return id < entries_.size() ? &entries_[id] : nullptr; }

  // Assigns a new id, which must be the next one, or renews the signature of a known one. Returns
  // false if the id is neither.
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
