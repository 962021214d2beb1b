// What an operation is apart from its memory: its name and its signature.
//
// Submissions that repeat share one identity, so that nothing of it is copied, compared or hashed
// again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/pool_allocator.h"
#include "controller/state/signature.h"

namespace horoplug {

struct Identity {
  Identity(std::string name, Signature signature);

  const std::string name;
  const Signature signature;
  // By which a plan finds the operation: see StepMember.
  const std::string key;
  const std::size_t name_hash, key_hash;
  // A hash of both: equal on all ranks for operations that run together, and different for others
  // with high probability.
  const std::uint64_t digest;
  const std::int64_t bytes;  // of all tensors together, as they travel
};

using IdentityPtr = std::shared_ptr<const Identity>;

inline IdentityPtr make_identity(std::string name, Signature signature) {
  return std::make_shared<const Identity>(std::move(name), std::move(signature));
}

// The name; operations without a name, which are numbered in submission order, have the key of
// their kind.
std::string step_key(const std::string& name, const Signature& signature);

// Hash tables of operations by name. Lookups with an identity neither hash its name nor, if it is
// the same one, compare it.
struct HashOfName {
  using is_transparent = void;
  std::size_t operator()(const IdentityPtr& identity) const { return identity->name_hash; }
  std::size_t operator()(std::string_view name) const {
    return std::hash<std::string_view>{}(name);
  }
};
struct SameName {
  using is_transparent = void;
  bool operator()(const IdentityPtr& a, const IdentityPtr& b) const {
    return a == b || a->name == b->name;
  }
  bool operator()(const IdentityPtr& a, std::string_view b) const { return a->name == b; }
  bool operator()(std::string_view a, const IdentityPtr& b) const { return a == b->name; }
};
using NameSet = std::unordered_set<IdentityPtr, HashOfName, SameName, PoolAllocator<IdentityPtr>>;
template <typename Value>
using ByName = std::unordered_map<IdentityPtr, Value, HashOfName, SameName,
                                  PoolAllocator<std::pair<const IdentityPtr, Value>>>;

}  // namespace horoplug
