#include "controller/plans/decision_queue.h"

#include <utility>

namespace horoplug {

void DecisionQueue::add_error(const std::string& name, Status error) {
  DecisionItem item;
  item.kind = DecisionItem::Kind::kError;
  item.name = name;
  item.code = error.code;
  item.text = std::move(error.message);
  errors_.push_back(std::move(item));
}

void DecisionQueue::add_end(int rank) {
  DecisionItem item;
  item.kind = DecisionItem::Kind::kClose;
  item.rank = rank;
  ends_.push_back(std::move(item));
}

DecisionQueue::Batch DecisionQueue::take_batch(const NameTable& names) {
  Batch batch{take_next_batch(ready_, options_.fusion_threshold, options_.fuse_groups), {}};
  batch.item.kind = DecisionItem::Kind::kBatch;
  batch.item.batch = next_number();
  for (const ReadyOperation& operation : batch.operations) {
    batch.item.members.push_back(member_of(operation, names));
  }
  return batch;
}

DecisionItem DecisionQueue::take_join(int rank) {
  DecisionItem item;
  item.kind = DecisionItem::Kind::kJoined;
  item.batch = next_number();
  item.rank = rank;
  return item;
}

DecisionItem::Member DecisionQueue::member_of(const ReadyOperation& operation,
                                              const NameTable& names) {
  DecisionItem::Member member;
  member.id = names.find(operation.name);
  if (!member.id) {
    member.name = operation.name;
    member.id = new_id(operation);
  } else if (!compatible(names.at(*member.id)->signature, operation.signature)) {
    member.name = operation.name;
  }
  if (!operation.absent.empty()) {
    member.absent = operation.absent;
    member.signature = operation.signature;
  }
  return member;
}

// The first half of the ids is assigned at first sight, the rest only to names that recur.
std::optional<std::uint32_t> DecisionQueue::new_id(const ReadyOperation& operation) {
  if (!operation.signature.recurring || next_id_ >= options_.cache_capacity) return std::nullopt;
  if (next_id_ < options_.cache_capacity / 2 || seen_once_.contains(operation.name)) {
    seen_once_.erase(operation.name);
    return next_id_++;
  }
  if (seen_once_.size() >= options_.cache_capacity) seen_once_.clear();
  seen_once_.insert(operation.name);
  return std::nullopt;
}

}  // namespace horoplug
