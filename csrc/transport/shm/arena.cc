#include "transport/shm/arena.h"

#include <string>

#include "base/status.h"

namespace horoplug {
SharedGroup::SharedGroup(int me, std::vector<Arena> arenas,
                         std::vector<std::shared_ptr<Doorbell>> doorbells, std::vector<int> global)
    : me_(me),
      arenas_(std::move(arenas)),
      doorbells_(std::move(doorbells)),
      global_(std::move(global)),
      operands_(arenas_.size()) {}

void SharedGroup::publish(Stage stage, std::uint64_t cycle, std::uint64_t place) {
  Arena::Flag& flag = arena(me_).flag(stage);
  if (stage == Stage::kPacked) {
    flag.checks[cycle % Arena::kSlots].store(check_, std::memory_order_relaxed);
    flag.places[cycle % Arena::kSlots].store(place, std::memory_order_relaxed);
  }
  flag.counter.store(cycle, std::memory_order_release);
  unheard_ = true;
}

SharedGroup::Inputs SharedGroup::inputs(std::uint64_t cycle) const {
  const auto place = [&](int rank) {
    return arena(rank)
        .flag(Stage::kPacked)
        .places[cycle % Arena::kSlots]
        .load(std::memory_order_relaxed);
  };
  const std::uint64_t mine = place(me_);
  for (int rank = 0; rank < size(); ++rank) {
    if (place(rank) != mine) return Inputs::kMixed;
  }
  return mine == 0 ? Inputs::kInSlots : Inputs::kInOnePlace;
}

void SharedGroup::show(std::uint64_t meeting) {
  Arena::Line& line = arena(me_).line(meeting);
  line.check.store(check_, std::memory_order_relaxed);
  line.meeting.store(meeting, std::memory_order_release);
  unheard_ = true;
}

void SharedGroup::ring() {
  if (!unheard_) return;
  unheard_ = false;
  full_fence();
  for (int rank = 0; rank < size(); ++rank) {
    if (rank != me_) doorbells_[static_cast<std::size_t>(rank)]->ring_unless_resting();
  }
}

void SharedGroup::skip() {
  // The ranks of one host may have passed any number of exchanges together, without the other
  // hosts.
  constexpr std::uint64_t kMore = std::uint64_t{1} << 32;
  cycle_ += kMore;
  meeting_ += kMore;
  arrive(Stage::kDone, cycle_);
}

void SharedGroup::compare(int rank, std::uint64_t check) const {
  if (check != check_) {
    throw PeerError(HP_INTERNAL, global_[static_cast<std::size_t>(rank)],
                    "it runs a batch with other contents");
  }
}

bool SharedGroup::Reached::ready() {
  bool arrived;
  if (only_ != kAll) {
    arrived = !waits_for(only_);
  } else {
    while (next_ < group_.size() && !waits_for(next_)) ++next_;
    arrived = next_ == group_.size();
  }
  if (!arrived) group_.ring();
  return arrived;
}

void SharedGroup::Reached::finish() {
  if (stage_ != Stage::kPacked) return;
  for (int rank = 0; rank < group_.size(); ++rank) {
    if (only_ != kAll && rank != only_) continue;
    group_.compare(rank, group_.arena(rank).flag(stage_).checks[cycle_ % Arena::kSlots].load(
                             std::memory_order_relaxed));
  }
}

void SharedGroup::Reached::blame(std::vector<int>& ranks) const {
  for (int rank = 0; rank < group_.size(); ++rank) {
    if ((only_ == kAll || rank == only_) && waits_for(rank)) {
      ranks.push_back(group_.global_[static_cast<std::size_t>(rank)]);
    }
  }
}

bool SharedGroup::Met::ready() {
  while (next_ < group_.size() && !waits_for(next_)) ++next_;
  if (next_ < group_.size()) group_.ring();
  return next_ == group_.size();
}

void SharedGroup::Met::finish() {
  for (int rank = 0; rank < group_.size(); ++rank) {
    group_.compare(rank, group_.arena(rank).line(meeting_).check.load(std::memory_order_relaxed));
  }
}

void SharedGroup::Met::blame(std::vector<int>& ranks) const {
  for (int rank = 0; rank < group_.size(); ++rank) {
    if (waits_for(rank)) ranks.push_back(group_.global_[static_cast<std::size_t>(rank)]);
  }
}

}  // namespace horoplug
