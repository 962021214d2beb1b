#include "controller/state/identity.h"

#include "base/hash.h"

namespace horoplug {

std::string step_key(const std::string& name, const Signature& signature) {
  return signature.recurring ? name : name.substr(0, name.rfind('.'));
}

Identity::Identity(std::string named, Signature agreed)
    : name(std::move(named)),
      signature(std::move(agreed)),
      key(step_key(name, signature)),
      name_hash(std::hash<std::string_view>{}(name)),
      key_hash(std::hash<std::string_view>{}(key)),
      digest(Hash().add(name).add(horoplug::digest(signature)).value()),
      bytes(payload_bytes(signature)) {}

}  // namespace horoplug
