// Determines, along the tree, which operations of a step may share a batch.
//
// If a program reads the result of one operation before it submits another one, the two must not
// share a batch: neither would ever complete. Every rank therefore counts dependency stages: a new
// one begins with the first submission after a result was observed. Operations that belong to the
// same dependency stage on every rank can be fused. A rank labels its operations with their stage.
// A node of the tree combines its own labels with those of its children: each combination that
// occurs becomes a label of its own. The labels at the root say for each pair of operations whether
// they share a stage on every rank. The size of an answer is one number per operation, whatever
// the number of ranks.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "controller/state/identity.h"

namespace horoplug {

// An operation as it was decided. `key`: see step_key().
struct StepMember {
  std::string key;
  Signature signature;
  std::uint64_t dependency_stage = 0;
};

class DependencyQuery {
 public:
  DependencyQuery() = default;
  // `children`: the number of answers to expect.
  DependencyQuery(std::uint64_t number, std::vector<StepMember> step, std::size_t children);

  std::uint64_t number() const { return number_; }
  const std::vector<StepMember>& step() const { return step_; }
  const std::vector<std::uint32_t>& labels() const { return labels_; }
  bool complete() const { return number_ > 0 && answers_left_ == 0; }

  // Adds a child's answer. Returns false if it is invalid: a wrong length, or one answer too many.
  bool add(std::span<const std::uint32_t> labels);

 private:
  std::uint64_t number_ = 0;  // 0: no query
  std::vector<StepMember> step_;
  std::vector<std::uint32_t> labels_;
  std::size_t answers_left_ = 0;
};

}  // namespace horoplug
