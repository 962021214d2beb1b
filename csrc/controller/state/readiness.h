// Gathers which operations are ready in the whole subtree of one node of the tree.
//
// A node hears of each operation once from its own rank and once from each child: either that the
// child's whole subtree has submitted it with compatible signatures, or which ranks have submitted
// it with which signature. Submissions under one name with incompatible signatures form variant
// groups. An operation is complete when every rank of the subtree has submitted it or has joined.
// It leaves the table then: the functions below return it.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "controller/state/signature.h"
#include "controller/state/topology.h"

namespace horoplug {

class ReadinessTable {
 public:
  // An operation that every rank of the subtree has submitted, apart from ranks that have joined.
  struct Complete {
    std::string name;
    Signature signature;  // of the first variant group
    // The variant groups with their ranks, in ascending order; empty if all ranks have submitted
    // the operation with compatible signatures.
    std::vector<Variant> variants;
  };

  // `position` must outlive the table.
  explicit ReadinessTable(const TreePosition& position);

  // This rank has submitted an operation, which it does once for each name until it is complete.
  std::optional<Complete> add_self(const std::string& name, const Signature& signature);
  // Child number `child` has announced that its whole subtree has submitted an operation with this
  // signature, or which ranks have submitted which variants. Throws WireError if the child has
  // announced this name before, or names ranks of another subtree.
  std::optional<Complete> add_child(std::size_t child, const std::string& name,
                                    const Signature& signature);
  std::optional<Complete> add_child(std::size_t child, const std::string& name,
                                    std::span<const Variant> variants);

  // A rank of the subtree submits nothing more. Returns the operations that this completes, by
  // name, so that all ranks see the same order. It looks at the operations only if with this rank
  // the whole subtree of a child has joined, or if it is this node's own rank: once for each child,
  // not for each rank.
  std::vector<Complete> join(int rank);
  bool has_joined(int rank) const { return joined_.contains(rank); }
  bool any_joined() const { return !joined_.empty(); }
  bool all_joined() const { return joined_.size() == position_.size(); }
  int last_joined() const { return last_joined_; }
  // Every rank has joined, and starts anew.
  void end_join() {
    joined_.clear();
    joined_below_.clear();
  }

  // The ranks of the subtree that are not among these.
  RankRanges absent_from(const RankRanges& submitted) const;
  // Whether an operation is in the table for which `matches` is true.
  bool any(const std::function<bool(const std::string& name, const Signature& signature)>& matches)
      const;

  // Forgets the operations. The ranks that have joined stay.
  void clear() { entries_.clear(); }

 private:
  // The parts of the subtree that have submitted an operation with compatible signatures.
  struct VariantGroup {
    Signature signature;
    bool self = false;
    std::vector<std::size_t> children;  // children whose whole subtree belongs to the group
    RankRanges ranks;                   // single ranks, where a subtree is divided
  };
  struct Entry {
    std::vector<VariantGroup> groups;
    std::vector<std::size_t> children_in;
    bool self_in = false;
  };
  using Entries = std::unordered_map<std::string, Entry>;

  Entries::iterator entry_for_child(std::size_t child, const std::string& name);
  static VariantGroup& group_of(Entry& entry, const Signature& signature);
  // Counts a rank that has joined. Returns whether all ranks of a child's subtree now have, or this
  // node's own rank has.
  bool count_join(int rank);
  bool subtree_has_joined(std::size_t child) const;
  bool is_complete(const Entry& entry) const;
  std::optional<Complete> take_if_complete(Entries::iterator entry);
  std::vector<Variant> variants_of(const Entry& entry) const;

  const TreePosition& position_;
  std::vector<RankRanges> below_;  // by child
  Entries entries_;
  std::set<int> joined_;
  std::vector<std::size_t> joined_below_;  // by child; empty if no rank below this node has joined
  int last_joined_ = -1;
};

}  // namespace horoplug
