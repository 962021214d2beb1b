// Compares steps of a program without regard to the order of their operations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>

#include "controller/state/signature.h"

namespace horoplug {

// A number for an operation: equal for equal keys and signatures, different for other ones with
// high probability.
std::uint64_t operation_digest(std::string_view key, const Signature& signature);

// A sum over operations: equal for steps with the same operations, each as often, in any order.
class StepDigest {
 public:
  void add(std::uint64_t operation);
  std::size_t operations() const { return operations_; }
  bool operator==(const StepDigest&) const = default;
  // The operations that were added to `*this` and not yet to `earlier`, an earlier state of it.
  StepDigest since(const StepDigest& earlier) const;

 private:
  std::uint64_t sum_ = 0;
  std::size_t operations_ = 0;
};

// The last operations of a sequence. Compares its end with a step in constant time.
class RecentOperations {
 public:
  explicit RecentOperations(std::size_t limit) : limit_(limit) {}

  void note(std::uint64_t operation);
  void clear() { operations_.clear(); }
  // The number of operations since clear(), or the limit.
  std::size_t size() const { return operations_.size(); }
  // Whether the sequence ends with a whole step that begins with the operation `first`.
  bool ends_with(std::uint64_t first, const StepDigest& step) const;

 private:
  struct Entry {
    std::uint64_t operation;
    StepDigest before;  // of the sequence up to this operation
  };
  const std::size_t limit_;
  std::deque<Entry> operations_;
  StepDigest all_;
};

}  // namespace horoplug
