#include "controller/plans/plan.h"

#include "base/wire.h"

namespace horoplug {

PlanContents make_plan(std::span<const StepMember> step, std::span<const std::uint32_t> labels,
                       std::int64_t limit, bool fuse_groups) {
  struct Batch {
    std::uint32_t label;
    const Signature* signature;  // of the batch's first operation
    std::int64_t bytes;
    bool open;
  };
  std::vector<Batch> batches;
  PlanContents contents;
  for (std::size_t slot = 0; slot < step.size(); ++slot) {
    const Signature& signature = step[slot].signature;
    const std::int64_t bytes = payload_bytes(signature);
    const bool apart = !fuse_groups && signature.shapes.size() > 1;
    // An operation may move into the last batch of its label, past later batches: no rank in those
    // can be waiting for this operation, since it had submitted all operations of this label before
    // it observed any result of theirs.
    std::size_t at = batches.size();
    for (std::size_t i = batches.size(); i-- > 0 && !apart;) {
      if (batches[i].label != labels[slot] || !fusable(*batches[i].signature, signature)) continue;
      if (batches[i].open && batches[i].bytes + bytes <= limit) at = i;
      break;
    }
    if (at == batches.size()) {
      batches.push_back({labels[slot], &signature, 0, !apart});
      contents.emplace_back();
    }
    batches[at].bytes += bytes;
    contents[at].push_back(static_cast<std::uint32_t>(slot));
  }
  return contents;
}

Plan::Plan(const std::vector<StepMember>& step) {
  for (std::size_t slot = 0; slot < step.size(); ++slot) {
    slots_.push_back({step[slot].signature});
    turns_[step[slot].key].slots.push_back(static_cast<std::uint32_t>(slot));
  }
}

void Plan::set_choices(std::span<const PlanChoice> choices, std::uint32_t rounds) {
  if (choices.empty()) throw WireError("plan without choices");
  choices_.clear();
  for (const PlanChoice& choice : choices) choices_.push_back(make_choice(choice, slots_.size()));
  trial_steps_ = std::uint64_t{rounds} * choices.size();
}

void Plan::begin(std::uint32_t epoch, std::uint64_t decided, std::size_t skipped) {
  if (choices_.empty()) throw WireError("plan without choices");
  epoch_ = epoch;
  joined_ = decided;
  step_ = 0;
  choice_ = last_choice_ = next_ = ready_ = 0;
  running_ = false;
  intact_ = true;
  last_.clear();
  for (Slot& slot : slots_) {
    slot.ready = false;
    slot.turns = 0;
  }
  for (auto& [key, turn] : turns_) turn.next = 0;
  for (Choice& choice : choices_) {
    for (Batch& batch : choice.batches) batch.ready = 0;
  }
  if (skipped == 0) return;
  // Otherwise it would depend on the order of the slots which ones of a key are skipped.
  if (turns_.size() != slots_.size() || skipped >= choices_[0].batches.size()) {
    throw WireError("plan that begins at an impossible batch");
  }
  for (; next_ < skipped; ++next_) {
    for (const std::uint32_t at : choices_[0].batches[next_].slots) ++slots_[at].turns;
  }
}

std::vector<std::uint32_t> Plan::slots_joined(std::uint64_t decided) const {
  std::size_t choice = choice_;
  std::size_t batches = next_;
  if (decided < joined_) {
    if (next_ == 0) {
      choice = last_choice_;
      batches = choices_[choice].batches.size();
    }
    --batches;
  }
  std::vector<std::uint32_t> slots;
  for (std::size_t i = 0; i < batches; ++i) {
    const auto& batch = choices_[choice].batches[i].slots;
    slots.insert(slots.end(), batch.begin(), batch.end());
  }
  return slots;
}

Plan::Choice Plan::make_choice(const PlanChoice& choice, std::size_t slots) {
  Choice made{choice.tuning, {}, std::vector<std::size_t>(slots, choice.batches.size())};
  for (const auto& batch : choice.batches) {
    for (const std::uint32_t slot : batch) {
      if (slot >= slots || made.batch_of[slot] != choice.batches.size()) {
        throw WireError("plan with an unknown or repeated operation");
      }
      made.batch_of[slot] = made.batches.size();
    }
    made.batches.push_back({batch});
  }
  for (const std::size_t batch : made.batch_of) {
    if (batch == choice.batches.size()) throw WireError("plan that lacks an operation of the step");
  }
  return made;
}

// The turns run forward and back, so that no choice always follows the same other one.
std::size_t Plan::choice_of(std::uint64_t step) const {
  if (step >= trial_steps_) return 0;
  const std::size_t turn = step % choices_.size();
  const bool goes_back = step / choices_.size() % 2 != 0;
  return goes_back ? choices_.size() - 1 - turn : turn;
}

Plan::Place Plan::ready(const IdentityPtr& operation) {
  const auto found = turns_.find(*operation);
  if (found == turns_.end()) return Place::kNone;
  Turn& turn = found->second;
  const std::uint32_t at = turn.slots[turn.next];
  Slot& slot = slots_[at];
  if (slot.ready) return Place::kTaken;
  const bool is_known = slot.operation != nullptr && slot.operation->shared == operation->shared;
  if (!is_known && !compatible(slot.signature, operation->signature)) {
    return Place::kTaken;
  }
  if (++turn.next == turn.slots.size()) turn.next = 0;
  slot.ready = true;
  slot.operation = operation;
  // A slot that was already joined in this step counts for the next one.
  Choice& choice = choices_[choice_of(slot.turns)];
  ++choice.batches[choice.batch_of[at]].ready;
  ++ready_;
  return Place::kFound;
}

bool Plan::join_next() {
  Batch& batch = choices_[choice_].batches[next_];
  if (running_ || !intact_ || !batch.complete()) return false;
  last_.clear();
  for (const std::uint32_t at : batch.slots) {
    slots_[at].ready = false;
    ++slots_[at].turns;
    last_.push_back(slots_[at].operation);
  }
  ready_ -= batch.ready;
  batch.ready = 0;
  last_choice_ = choice_;
  if (++next_ == choices_[choice_].batches.size()) {
    next_ = 0;
    choice_ = choice_of(++step_);
  }
  ++joined_;
  running_ = true;
  running_epoch_ = epoch_;
  return true;
}

bool Plan::withdraw() {
  running_ = false;
  --joined_;
  if (next_ == 0) {
    --step_;
    choice_ = last_choice_;
    next_ = choices_[choice_].batches.size();
  }
  Batch& batch = choices_[choice_].batches[--next_];
  for (const std::uint32_t at : batch.slots) intact_ &= !slots_[at].ready;
  if (!intact_) return false;
  for (std::size_t i = 0; i < batch.slots.size(); ++i) {
    Slot& slot = slots_[batch.slots[i]];
    slot.ready = true;
    slot.operation = last_[i];
    --slot.turns;
  }
  batch.ready = batch.slots.size();
  ready_ += batch.ready;
  return true;
}

}  // namespace horoplug
