#include "controller/state/refusal.h"

namespace horoplug {
namespace {

// The reason why ranks that have joined cannot be left out of an operation; empty if they can.
std::string objection(const Signature& signature, const RankRanges& absent) {
  if (absent.empty()) return {};
  if (is_administrative(signature.op)) {
    const bool one = absent.count() == 1;
    return describe_ranks(absent.ranks()) + (one ? " has" : " have") + " joined and " +
           (one ? "takes" : "take") + " part in nothing of the kind any more";
  }
  const bool is_lost = operation_info(signature.op).has_root && absent.contains(signature.root);
  return is_lost ? "its root, rank " + std::to_string(signature.root) + ", has joined" : "";
}

}  // namespace

Status refusal(const std::string& name, const Signature& signature,
               const std::vector<Variant>& variants, const RankRanges& absent) {
  if (variants.size() > 1) return mismatch(name, variants);
  const std::string reason = objection(signature, absent);
  if (reason.empty()) return {};
  return {HP_MISMATCH, "'" + name + "' cannot run: " + reason};
}

}  // namespace horoplug
