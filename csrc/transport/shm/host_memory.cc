#include "transport/shm/host_memory.h"

#include "base/status.h"

namespace horoplug {
HostMemory::HostMemory(int me, std::vector<Arena> arenas,
                       std::vector<std::shared_ptr<Doorbell>> doorbells, std::vector<int> global)
    : me_(me),
      arenas_(std::move(arenas)),
      doorbells_(std::move(doorbells)),
      global_(std::move(global)),
      operands_(arenas_.size()) {}

void HostMemory::publish(Stage stage, std::uint64_t cycle, std::uint64_t place) {
  Arena::Flag& flag = arena(me_).flag(stage);
  if (stage == Stage::kPacked) {
    flag.checks[cycle % Arena::kSlots].store(check_, std::memory_order_relaxed);
    flag.places[cycle % Arena::kSlots].store(place, std::memory_order_relaxed);
  }
  flag.counter.store(cycle, std::memory_order_release);
  ring_pending_ = true;
}

HostMemory::Inputs HostMemory::inputs(std::uint64_t cycle) const {
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

void HostMemory::publish_line(std::uint64_t exchange) {
  Arena::FlagLine& line = arena(me_).line(exchange);
  line.check.store(check_, std::memory_order_relaxed);
  line.flag.store(exchange, std::memory_order_release);
  ring_pending_ = true;
}

void HostMemory::ring() {
  if (!ring_pending_) return;
  ring_pending_ = false;
  full_fence();
  for (int rank = 0; rank < size(); ++rank) {
    if (rank != me_) doorbells_[static_cast<std::size_t>(rank)]->ring_unless_resting();
  }
}

void HostMemory::skip() {
  // The ranks of one host may have passed any number of exchanges together, without the other
  // hosts.
  constexpr std::uint64_t kMore = std::uint64_t{1} << 32;
  cycle_ += kMore;
  exchange_ += kMore;
  publish(Stage::kDone, cycle_, 0);
  ring();
}

void HostMemory::compare(int rank, std::uint64_t check) const {
  if (check != check_) {
    throw PeerError(HP_INTERNAL, global_[static_cast<std::size_t>(rank)],
                    "it runs a batch with other contents");
  }
}

bool HostMemory::Reached::ready() {
  bool arrived;
  if (only_ != kAll) {
    arrived = !waits_for(only_);
  } else {
    while (next_ < memory_.size() && !waits_for(next_)) ++next_;
    arrived = next_ == memory_.size();
  }
  if (!arrived) memory_.ring();
  return arrived;
}

void HostMemory::Reached::finish() {
  if (stage_ != Stage::kPacked) return;
  for (int rank = 0; rank < memory_.size(); ++rank) {
    if (only_ != kAll && rank != only_) continue;
    memory_.compare(rank, memory_.arena(rank).flag(stage_).checks[cycle_ % Arena::kSlots].load(
                              std::memory_order_relaxed));
  }
}

void HostMemory::Reached::blame(std::vector<int>& ranks) const {
  for (int rank = 0; rank < memory_.size(); ++rank) {
    if ((only_ == kAll || rank == only_) && waits_for(rank)) {
      ranks.push_back(memory_.global_[static_cast<std::size_t>(rank)]);
    }
  }
}

bool HostMemory::Exchanged::ready() {
  while (next_ < memory_.size() && !waits_for(next_)) ++next_;
  if (next_ < memory_.size()) memory_.ring();
  return next_ == memory_.size();
}

void HostMemory::Exchanged::finish() {
  for (int rank = 0; rank < memory_.size(); ++rank) {
    memory_.compare(rank,
                    memory_.arena(rank).line(exchange_).check.load(std::memory_order_relaxed));
  }
}

void HostMemory::Exchanged::blame(std::vector<int>& ranks) const {
  for (int rank = 0; rank < memory_.size(); ++rank) {
    if (waits_for(rank)) ranks.push_back(memory_.global_[static_cast<std::size_t>(rank)]);
  }
}

}  // namespace horoplug
