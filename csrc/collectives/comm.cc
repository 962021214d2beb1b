#include "collectives/comm.h"

namespace horoplug {

void Comm::begin(const Channel& channel, BatchTrace* trace) {
  channel_ = channel;
  trace_ = trace;
  tickets_.assign(links_.size(), 0);
  if (shared_ != nullptr) shared_->begin(channel.check);
}

void Comm::end() {
  trace_ = nullptr;
  if (shared_ != nullptr) shared_->ring();
  for (Link* link : links_) {
    if (link != nullptr) link->forget(channel_);
  }
}

void Comm::withdraw() {
  end();
  for (Link* link : links_) {
    if (link != nullptr) link->take_back(channel_);
  }
  if (shared_ != nullptr) shared_->withdraw();
}

void Comm::drop(const Channel& first_dropped) {
  for (Link* link : links_) {
    if (link != nullptr) {
      link->end_epoch(first_dropped.set, first_dropped.epoch, first_dropped.batch);
    }
  }
}

void Comm::resume() {
  if (shared_ != nullptr) shared_->skip();
}

void Comm::send(int rank, const void* data, std::size_t bytes) {
  tickets_[static_cast<std::size_t>(rank)] = link(rank).send(channel_, data, bytes);
}

std::byte* Comm::scratch(Scratch purpose, std::size_t bytes) {
  constexpr std::size_t kLine = 64;
  auto& [memory, size] = scratch_[static_cast<std::size_t>(purpose)];
  if (size < bytes + kLine) {
    size = bytes + kLine;
    memory.reset();
    memory = std::make_unique_for_overwrite<std::byte[]>(size);
  }
  const auto address = reinterpret_cast<std::uintptr_t>(memory.get());
  return memory.get() + (kLine - address % kLine) % kLine;
}

bool Comm::Flushed::ready() {
  for (std::size_t rank = 0; rank < comm_.links_.size(); ++rank) {
    if (comm_.tickets_[rank] != 0 && !comm_.links_[rank]->sent(comm_.tickets_[rank])) return false;
  }
  return true;
}

void Comm::Flushed::blame(std::vector<int>& ranks) const {
  for (std::size_t rank = 0; rank < comm_.links_.size(); ++rank) {
    if (comm_.tickets_[rank] != 0 && !comm_.links_[rank]->sent(comm_.tickets_[rank])) {
      ranks.push_back(comm_.links_[rank]->peer());
    }
  }
}

}  // namespace horoplug
