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
  // The same operation under another name.
  Identity(std::string name, const Identity& other);
  Identity(const Identity&) = delete;
  Identity& operator=(const Identity&) = delete;

  const std::string name;
  const std::shared_ptr<const Signature> shared;  // with those that differ by their names only
  const Signature& signature;
  // By which a plan finds the operation: see step_key().
  const std::string_view key;
  const std::size_t name_hash, key_hash;
  const std::int64_t bytes;  // of all tensors together, as they travel
  // Hashes of the signature, and of both: equal on all ranks for operations that run together, and
  // different for others with high probability.
  const std::uint64_t signature_digest, digest;

 private:
  Identity(std::string name, const std::shared_ptr<const Signature>& signature);
  Identity(std::string name, std::shared_ptr<const Signature> signature, std::int64_t bytes,
           std::uint64_t signature_digest);
};

using IdentityPtr = std::shared_ptr<const Identity>;

// `what`: the signature, or an operation that differs by its name only.
template <typename What>
IdentityPtr make_identity(std::string name, What&& what) {
  return std::make_shared<const Identity>(std::move(name), std::forward<What>(what));
}

// The name; operations without a name, which are numbered in submission order, have the key of
// their kind.
std::string_view step_key(std::string_view name, const Signature& signature);

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
