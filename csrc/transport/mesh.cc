#include "transport/mesh.h"

namespace horoplug {

Mesh::Mesh(std::vector<std::unique_ptr<Stream>> streams, std::shared_ptr<Doorbell> doorbell,
           Link::ControlHandler on_control)
    : doorbell_(std::move(doorbell)), poller_(*doorbell_) {
  for (std::size_t rank = 0; rank < streams.size(); ++rank) {
    if (!streams[rank]) {
      links_.push_back(nullptr);
      continue;
    }
    const int token = static_cast<int>(rank);
    auto link = std::make_unique<Link>(token, std::move(streams[rank]), on_control);
    if (link->fd() >= 0) {
      poller_.add(link->fd(), token);
    } else {
      without_fd_.push_back(link.get());
    }
    links_.push_back(std::move(link));
  }
}

Mesh::~Mesh() = default;

void Mesh::send_control(int rank, Bytes message) { link(rank)->send_control(std::move(message)); }

void Mesh::send_control_to_all(const Bytes& message) {
  for (const auto& link : links_) {
    if (link) link->send_control(message);
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
  if (readable_.empty() && without_fd_.size() + 1 < links_.size()) poller_.wait(0, readable_);
  for (const int rank : readable_) moved |= read(*link(rank));
  readable_.clear();
  for (Link* link : without_fd_) moved |= read(*link);
  return pump_writes() || moved;
}

bool Mesh::pump_writes() {
  bool moved = false;
  for (const auto& link : links_) {
    if (!link || link->failure()) continue;
    if (link->wants_write()) moved |= link->pump_write();
    if (link->fd() >= 0) poller_.want_write(link->fd(), link->peer(), link->wants_write());
  }
  return moved;
}

void Mesh::close_writes() {
  for (const auto& link : links_) {
    if (link && !link->failure()) link->close_write();
  }
}

bool Mesh::all_closed_by_peers() const {
  for (const auto& link : links_) {
    if (link && !link->failure()) return false;
  }
  return true;
}

std::uint64_t Mesh::control_messages() const {
  std::uint64_t sum = 0;
  for (const auto& link : links_) sum += link ? link->control_messages() : 0;
  return sum;
}

std::uint64_t Mesh::control_bytes() const {
  std::uint64_t sum = 0;
  for (const auto& link : links_) sum += link ? link->control_bytes() : 0;
  return sum;
}

std::uint64_t Mesh::bytes_moved() const {
  std::uint64_t sum = 0;
  for (const auto& link : links_) sum += link ? link->bytes_moved() : 0;
  return sum;
}

}  // namespace horoplug
