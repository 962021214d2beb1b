// Finds out, along the tree, which operations of a step may share a batch.
//
// A program that looks at the result of one operation before it submits another one would wait for
// ever if both were in the same batch. So every rank counts in waves: a new one begins with the
// first submission after a look at a result. Operations of one dependency_epoch on every rank can
// be fused. A rank labels the operations by their dependency_epoch, and a node of the tree gives a
// label of its own to every combination of labels that occurs: what comes out at the root says for
// each pair whether they are of one dependency_epoch everywhere, in one number per operation,
// however many ranks there are.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "controller/signature.h"

namespace horoplug {

// An operation as it was decided. `key` is its name; operations without a name, which are numbered
// as they are submitted, have the key of their kind.
struct StepMember {
  std::string key;
  Signature signature;
  std::uint64_t dependency_epoch = 0;
};
std::string step_key(const std::string& name, const Signature& signature);

class DependencyQuery {
 public:
  DependencyQuery() = default;
  // `children`: how many will answer.
  DependencyQuery(std::uint64_t number, std::vector<StepMember> step, std::size_t children);

  std::uint64_t number() const { return number_; }
  const std::vector<StepMember>& step() const { return step_; }
  const std::vector<std::uint32_t>& labels() const { return labels_; }
  bool complete() const { return number_ > 0 && answers_left_ == 0; }

  // The answer of a child; false if it cannot be right: too long or short, or one too many.
  bool add(std::span<const std::uint32_t> labels);

 private:
  std::uint64_t number_ = 0;  // 0: there is none
  std::vector<StepMember> step_;
  std::vector<std::uint32_t> labels_;
  std::size_t answers_left_ = 0;
};

}  // namespace horoplug
