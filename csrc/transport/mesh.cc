#include "transport/mesh.h"

namespace horoplug {

Mesh::Mesh(std::vector<std::vector<std::unique_ptr<Stream>>> lanes,
           std::shared_ptr<Doorbell> doorbell, Link::ControlHandler on_control)
    : doorbell_(std::move(doorbell)), poller_(*doorbell_), lanes_(lanes.size()) {
  for (std::size_t rank = 0; rank < lanes.size(); ++rank) {
    for (auto& stream : lanes[rank]) {
      auto link = std::make_unique<Link>(static_cast<int>(rank), std::move(stream), on_control);
      if (link->fd() >= 0) {
        poller_.add(link->fd(), static_cast<int>(links_.size()));
      } else {
        without_fd_.push_back(link.get());
      }
      lanes_[rank].push_back(link.get());
      links_.push_back(std::move(link));
    }
  }
}

Mesh::~Mesh() = default;

void Mesh::send_control(int rank, Bytes message) { link(rank)->send_control(std::move(message)); }

void Mesh::send_control_to_all(const Bytes& message) {
  for (int rank = 0; rank < size(); ++rank) {
    if (link(rank) != nullptr) link(rank)->send_control(message);
  }
}

bool Mesh::read(Link& link) {
  if (link.failure()) return false;
  const bool moved = link.pump_read();
  // Its descriptor would report the end again and again.
  if (link.failure() && link.fd() >= 0) poller_.remove(link.fd());
  return moved || link.failure();
}

bool Mesh::pump() {
  bool moved = false;
  if (readable_.empty() && without_fd_.size() < links_.size()) poller_.wait(0, readable_);
  for (const int token : readable_) moved |= read(*links_[static_cast<std::size_t>(token)]);
  readable_.clear();
  for (Link* link : without_fd_) moved |= read(*link);
  return pump_writes() || moved;
}

bool Mesh::pump_writes() {
  bool moved = false;
  for (std::size_t token = 0; token < links_.size(); ++token) {
    Link& link = *links_[token];
    if (link.failure()) continue;
    if (link.wants_write()) moved |= link.pump_write();
    if (link.fd() >= 0) {
      poller_.want_write(link.fd(), static_cast<int>(token), link.wants_write());
    }
  }
  return moved;
}

const Link* Mesh::failed(int rank) {
  for (Link* lane : lanes(rank)) {
    if (!lane->failure()) continue;
    if (!link(rank)->failure()) read(*link(rank));
    return lane;
  }
  return nullptr;
}

void Mesh::close_writes() {
  for (int rank = 0; rank < size(); ++rank) {
    if (link(rank) != nullptr && !link(rank)->failure()) link(rank)->close_write();
  }
}

bool Mesh::all_closed_by_peers() const {
  for (int rank = 0; rank < size(); ++rank) {
    if (link(rank) != nullptr && !link(rank)->failure()) return false;
  }
  return true;
}

std::uint64_t Mesh::control_messages() const {
  std::uint64_t sum = 0;
  for (const auto& link : links_) sum += link->control_messages();
  return sum;
}

std::uint64_t Mesh::control_bytes() const {
  std::uint64_t sum = 0;
  for (const auto& link : links_) sum += link->control_bytes();
  return sum;
}

std::uint64_t Mesh::bytes_moved() const {
  std::uint64_t sum = 0;
  for (const auto& link : links_) sum += link->bytes_moved();
  return sum;
}

}  // namespace horoplug
