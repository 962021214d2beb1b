#include "transport/shm/arena.h"

#include <string>

#include "base/status.h"

namespace horoplug {

SharedGroup::SharedGroup(int me, std::vector<Arena> arenas,
                         std::vector<std::shared_ptr<Doorbell>> doorbells, std::vector<int> global)
    : me_(me),
      arenas_(std::move(arenas)),
      doorbells_(std::move(doorbells)),
      global_(std::move(global)) {}

void SharedGroup::arrive(Stage stage, std::uint64_t cycle) {
  const Arena& mine = arenas_[static_cast<std::size_t>(me_)];
  if (stage == Stage::kPacked) {
    mine.header().checks[cycle % Arena::kSlots].value.store(check_, std::memory_order_relaxed);
  }
  mine.stage(stage).store(cycle);
  for (int rank = 0; rank < size(); ++rank) {
    if (rank != me_) doorbells_[static_cast<std::size_t>(rank)]->ring();
  }
}

void SharedGroup::skip() {
  cycle_ += Arena::kSlots;
  arrive(Stage::kDone, cycle_);
}

bool SharedGroup::Reached::waits_for(int rank) const {
  return group_.arenas_[static_cast<std::size_t>(rank)].stage(stage_).load() < cycle_;
}

bool SharedGroup::Reached::ready() {
  if (only_ != kAll) return !waits_for(only_);
  while (next_ < group_.size() && !waits_for(next_)) ++next_;
  return next_ == group_.size();
}

void SharedGroup::Reached::finish() {
  if (stage_ != Stage::kPacked) return;
  for (int rank = 0; rank < group_.size(); ++rank) {
    if (only_ != kAll && rank != only_) continue;
    const auto member = static_cast<std::size_t>(rank);
    const std::uint64_t theirs =
        group_.arenas_[member].header().checks[cycle_ % Arena::kSlots].value.load(
            std::memory_order_relaxed);
    if (theirs != group_.check_) {
      throw PeerError(HP_INTERNAL, group_.global_[member], "it runs a batch with other contents");
    }
  }
}

void SharedGroup::Reached::blame(std::vector<int>& ranks) const {
  for (int rank = 0; rank < group_.size(); ++rank) {
    if ((only_ == kAll || rank == only_) && waits_for(rank)) {
      ranks.push_back(group_.global_[static_cast<std::size_t>(rank)]);
    }
  }
}

}  // namespace horoplug
