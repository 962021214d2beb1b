#include "controller/state/readiness.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "base/wire.h"

namespace horoplug {

ReadinessTable::ReadinessTable(const TreePosition& position) : position_(position) {
  for (const auto& below : position_.subtrees) below_.emplace_back(std::span(below));
}

std::optional<ReadinessTable::Complete> ReadinessTable::add_self(const std::string& name,
                                                                 const Signature& signature) {
  const auto found = entries_.try_emplace(name).first;
  found->second.self_in = true;
  group_of(found->second, signature).self = true;
  return take_if_complete(found);
}

ReadinessTable::Entries::iterator ReadinessTable::entry_for_child(std::size_t child,
                                                                  const std::string& name) {
  const auto found = entries_.try_emplace(name).first;
  auto& in = found->second.children_in;
  if (std::find(in.begin(), in.end(), child) != in.end()) {
    throw WireError("it was ready for '" + name + "' already");
  }
  in.push_back(child);
  return found;
}

std::optional<ReadinessTable::Complete> ReadinessTable::add_child(std::size_t child,
                                                                  const std::string& name,
                                                                  const Signature& signature) {
  const auto found = entry_for_child(child, name);
  group_of(found->second, signature).children.push_back(child);
  return take_if_complete(found);
}

std::optional<ReadinessTable::Complete> ReadinessTable::add_child(
    std::size_t child, const std::string& name, std::span<const Variant> variants) {
  for (const Variant& variant : variants) {
    if (!below_[child].contains(variant.ranks)) {
      throw WireError("ready ranks outside the sender's subtree");
    }
  }
  const auto found = entry_for_child(child, name);
  for (const Variant& variant : variants) {
    group_of(found->second, variant.signature).ranks.add(variant.ranks);
  }
  return take_if_complete(found);
}

std::vector<ReadinessTable::Complete> ReadinessTable::join(int rank) {
  if (!joined_.insert(rank).second) throw std::logic_error("joined twice");
  last_joined_ = rank;
  if (!count_join(rank)) return {};
  std::vector<Entries::iterator> complete;
  for (auto entry = entries_.begin(); entry != entries_.end(); ++entry) {
    if (is_complete(entry->second)) complete.push_back(entry);
  }
  std::sort(complete.begin(), complete.end(),
            [](const auto& a, const auto& b) { return a->first < b->first; });
  std::vector<Complete> operations;
  operations.reserve(complete.size());
  for (const auto& entry : complete) operations.push_back(*take_if_complete(entry));
  return operations;
}

RankRanges ReadinessTable::absent_from(const RankRanges& submitted) const {
  RankRanges all{position_.rank};
  for (const RankRanges& below : below_) all.add(below);
  return all.without(submitted);
}

bool ReadinessTable::any(
    const std::function<bool(const std::string&, const Signature&)>& matches) const {
  return std::any_of(entries_.begin(), entries_.end(), [&](const auto& entry) {
    return matches(entry.first, entry.second.groups.front().signature);
  });
}

ReadinessTable::VariantGroup& ReadinessTable::group_of(Entry& entry, const Signature& signature) {
  for (VariantGroup& group : entry.groups) {
    if (compatible(group.signature, signature)) return group;
  }
  entry.groups.push_back({signature, false, {}, {}});
  return entry.groups.back();
}

bool ReadinessTable::count_join(int rank) {
  if (rank == position_.rank) return true;
  joined_below_.resize(position_.children.size());
  for (std::size_t child = 0; child < joined_below_.size(); ++child) {
    const auto& below = position_.subtrees[child];
    if (std::find(below.begin(), below.end(), rank) == below.end()) continue;
    ++joined_below_[child];
    return subtree_has_joined(child);
  }
  return false;
}

bool ReadinessTable::subtree_has_joined(std::size_t child) const {
  return !joined_below_.empty() && joined_below_[child] == position_.subtrees[child].size();
}

bool ReadinessTable::is_complete(const Entry& entry) const {
  if (!entry.self_in && !has_joined(position_.rank)) return false;
  const auto& in = entry.children_in;
  if (in.size() == position_.children.size()) return true;
  if (joined_.empty()) return false;
  for (std::size_t child = 0; child < position_.children.size(); ++child) {
    if (std::find(in.begin(), in.end(), child) == in.end() && !subtree_has_joined(child)) {
      return false;
    }
  }
  return true;
}

std::optional<ReadinessTable::Complete> ReadinessTable::take_if_complete(Entries::iterator found) {
  if (!is_complete(found->second)) return std::nullopt;
  auto node = entries_.extract(found);
  Entry& entry = node.mapped();
  Complete complete{std::move(node.key()), {}, {}};
  // A child names its ranks when ranks below it have joined, which this rank may learn a moment
  // later.
  if (entry.groups.size() > 1 || any_joined() || !entry.groups.front().ranks.empty()) {
    complete.variants = variants_of(entry);
  }
  complete.signature = std::move(entry.groups.front().signature);
  return complete;
}

std::vector<Variant> ReadinessTable::variants_of(const Entry& entry) const {
  std::vector<Variant> variants;
  for (const VariantGroup& group : entry.groups) {
    Variant variant{group.signature, group.ranks};
    if (group.self) variant.ranks.add(position_.rank);
    for (const std::size_t child : group.children) variant.ranks.add(below_[child]);
    variants.push_back(std::move(variant));
  }
  // Messages list ranks in ascending order.
  const auto first = [](const Variant& variant) { return variant.ranks.ranges().front().first; };
  std::sort(variants.begin(), variants.end(),
            [&](const Variant& a, const Variant& b) { return first(a) < first(b); });
  return variants;
}

}  // namespace horoplug
