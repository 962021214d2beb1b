#include "collectives/comm.h"

#include "base/cache_line.h"

namespace horoplug {

Comm::Comm(int rank, std::vector<std::vector<Link*>> lanes, HostMemory* host_memory,
           const Costs& costs)
    : rank_(rank), host_memory_(host_memory), measured_(costs), costs_(costs) {
  for (auto& links : lanes) peers_.push_back({std::move(links), {}});
}

void Comm::set_hosts(HostGrid hosts, HostMemory* local_memory, bool shares) {
  if (hosts.hosts() == 1 || hosts.most() == 1) return;
  hosts_.emplace(std::move(hosts));
  if (!shares) return;
  local_memory_ = local_memory;
  local_comm_ = part(hosts_->host_ranks(rank_), local_memory, measured_);
  const int local_rank = hosts_->local_rank(rank_);
  if (local_rank >= hosts_->fewest()) return;
  // All local ranks exchange their slices over the host's link at once.
  Costs shared = measured_;
  shared.stream.byte *= hosts_->fewest();
  cross_comm_ = part(hosts_->cross_ranks(local_rank), nullptr, shared);
}

// A subset of the ranks, over the same links.
std::unique_ptr<Comm> Comm::part(const std::vector<int>& ranks, HostMemory* host_memory,
                                 const Costs& costs) const {
  std::vector<std::vector<Link*>> lanes;
  int place = 0;
  for (const int rank : ranks) {
    if (rank == rank_) place = static_cast<int>(lanes.size());
    lanes.push_back(peers_[static_cast<std::size_t>(rank)].lanes);
  }
  return std::make_unique<Comm>(place, std::move(lanes), host_memory, costs);
}

void Comm::begin(const Channel& channel, BatchTrace* trace, const Tuning& tuning) {
  channel_ = channel;
  committed_ = false;
  trace_ = trace;
  chunk_bytes_ = static_cast<std::size_t>(tuning.chunk_bytes);
  costs_.stream.latency =
      measured_.stream.latency * static_cast<double>(tuning.latency_percent) / 100;
  for (Peer& peer : peers_) {
    peer.tickets.assign(peer.lanes.size(), 0);
    peer.sent = peer.received = 0;
    peer.in_use = std::min(peer.lanes.size(), static_cast<std::size_t>(tuning.lanes));
  }
  if (host_memory_ != nullptr) host_memory_->begin(channel.check);
  if (local_memory_ != nullptr) local_memory_->begin(channel.check);
  for (Comm* const some : {local_comm_.get(), cross_comm_.get()}) {
    if (some != nullptr) some->begin(channel, nullptr, tuning);
  }
}

void Comm::commit() {
  committed_ = true;
  for (Comm* const some : {local_comm_.get(), cross_comm_.get()}) {
    if (some != nullptr) some->commit();
  }
}

void Comm::end() {
  trace_ = nullptr;
  for (HostMemory* memory : {host_memory_, local_memory_}) {
    if (memory != nullptr) memory->ring();
  }
  for (const Peer& peer : peers_) {
    for (Link* lane : peer.lanes) lane->forget(channel_);
  }
}

void Comm::take_back() {
  for (const Peer& peer : peers_) {
    for (Link* lane : peer.lanes) lane->take_back(channel_);
  }
}

void Comm::withdraw() {
  end();
  take_back();
  for (HostMemory* memory : {host_memory_, local_memory_}) {
    if (memory != nullptr) memory->withdraw();
  }
}

void Comm::drop(const Channel& first_dropped) {
  for (const Peer& peer : peers_) {
    for (Link* lane : peer.lanes) {
      lane->end_epoch(first_dropped.set, first_dropped.epoch, first_dropped.batch);
    }
  }
}

void Comm::resume() {
  for (HostMemory* memory : {host_memory_, local_memory_}) {
    if (memory != nullptr) memory->skip();
  }
}

void Comm::send(int rank, const void* data, std::size_t bytes) {
  Peer& to = peer(rank);
  const std::size_t lane = to.sent++ % to.in_use;
  to.tickets[lane] = to.lanes[lane]->send(channel_, data, bytes);
}

std::byte* Comm::scratch(Scratch purpose, std::size_t bytes) {
  auto& [memory, size] = scratch_[static_cast<std::size_t>(purpose)];
  if (!memory || size < bytes + kCacheLine) {
    size = bytes + kCacheLine;
    memory.reset();
    memory = std::make_unique_for_overwrite<std::byte[]>(size);
  }
  const auto address = reinterpret_cast<std::uintptr_t>(memory.get());
  return memory.get() + (kCacheLine - address % kCacheLine) % kCacheLine;
}

void Comm::everyone_else(std::vector<int>& ranks) const {
  for (const Peer& peer : peers_) {
    if (!peer.lanes.empty()) ranks.push_back(peer.lanes.front()->peer());
  }
}

bool Comm::Peer::flushed(const Channel& channel) const {
  for (std::size_t i = 0; i < lanes.size(); ++i) {
    if (tickets[i] != 0 && !lanes[i]->sent(channel, tickets[i])) return false;
  }
  return true;
}

bool Comm::Flushed::ready() {
  for (const Peer& peer : comm_.peers_) {
    if (!peer.flushed(comm_.channel_)) return false;
  }
  return true;
}

void Comm::Flushed::blame(std::vector<int>& ranks) const {
  for (const Peer& peer : comm_.peers_) {
    if (!peer.flushed(comm_.channel_)) ranks.push_back(peer.lanes.front()->peer());
  }
}

}  // namespace horoplug
