#include "controller/plans/dependency_query.h"

#include <utility>

namespace horoplug {
namespace {

// Maps equal keys to equal small numbers, in order of first appearance.
template <typename Key>
class Numbering {
 public:
  std::uint32_t operator()(const Key& key) {
    return numbers_.emplace(key, static_cast<std::uint32_t>(numbers_.size())).first->second;
  }

 private:
  std::map<Key, std::uint32_t> numbers_;
};

}  // namespace

DependencyQuery::DependencyQuery(std::uint64_t number, std::vector<StepMember> step,
                                 std::size_t children)
    : number_(number), step_(std::move(step)), answers_left_(children) {
  Numbering<std::uint64_t> label;
  for (const StepMember& member : step_) labels_.push_back(label(member.dependency_stage));
}

bool DependencyQuery::add(std::span<const std::uint32_t> labels) {
  if (labels.size() != labels_.size() || answers_left_ == 0) return false;
  --answers_left_;
  Numbering<std::pair<std::uint32_t, std::uint32_t>> label;
  for (std::size_t i = 0; i < labels_.size(); ++i) labels_[i] = label({labels_[i], labels[i]});
  return true;
}

}  // namespace horoplug
