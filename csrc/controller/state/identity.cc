#include "controller/state/identity.h"

#include "base/hash.h"

namespace horoplug {

std::string_view step_key(std::string_view name, const Signature& signature) {
  return signature.recurring ? name : name.substr(0, name.rfind('.'));
}

Identity::Identity(std::string named, std::shared_ptr<const Signature> agreed, std::int64_t payload,
                   std::uint64_t hash)
    : name(std::move(named)),
      shared(std::move(agreed)),
      signature(*shared),
      key(step_key(name, signature)),
      name_hash(std::hash<std::string_view>{}(name)),
      key_hash(key.size() == name.size() ? name_hash : std::hash<std::string_view>{}(key)),
      bytes(payload),
      signature_digest(hash),
      digest(Hash().add(name).add(hash).value()) {}

Identity::Identity(std::string named, const std::shared_ptr<const Signature>& agreed)
    : Identity(std::move(named), agreed, payload_bytes(*agreed), horoplug::digest(*agreed)) {}

Identity::Identity(std::string named, Signature agreed)
    : Identity(std::move(named), std::make_shared<const Signature>(std::move(agreed))) {}

Identity::Identity(std::string named, const Identity& other)
    : Identity(std::move(named), other.shared, other.bytes, other.signature_digest) {}

}  // namespace horoplug
