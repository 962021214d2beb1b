#include "controller/plans/step_digest.h"

#include "base/hash.h"

namespace horoplug {
namespace {

// The finalizer of SplitMix64: sums of the results differ unless all operations are equal.
std::uint64_t mix(std::uint64_t value) {
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EB;
  return value ^ (value >> 31);
}

}  // namespace

std::uint64_t operation_digest(std::string_view key, const Signature& signature) {
  return Hash().add(key).add(digest(signature)).value();
}

void StepDigest::add(std::uint64_t operation) {
  sum_ += mix(operation);
  ++operations_;
}

StepDigest StepDigest::since(const StepDigest& earlier) const {
  StepDigest difference;
  difference.sum_ = sum_ - earlier.sum_;
  difference.operations_ = operations_ - earlier.operations_;
  return difference;
}

void RecentOperations::note(std::uint64_t operation) {
  if (operations_.size() >= limit_) operations_.pop_front();
  operations_.push_back({operation, all_});
  all_.add(operation);
}

bool RecentOperations::ends_with(std::uint64_t first, const StepDigest& step) const {
  const std::size_t count = step.operations();
  if (count == 0 || count > operations_.size()) return false;
  const Entry& begin = operations_[operations_.size() - count];
  return begin.operation == first && all_.since(begin.before) == step;
}

}  // namespace horoplug
