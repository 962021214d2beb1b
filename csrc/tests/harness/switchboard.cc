#include "harness/switchboard.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "transport/absent_stream.h"

namespace horoplug::testing {

Switchboard::Switchboard(std::vector<EngineConfig>& configs, const Connected& connected)
    : stop_(::eventfd(0, EFD_CLOEXEC)) {
  const auto take = [&](int rank, int peer) {
    Member& member =
        configs[static_cast<std::size_t>(rank)].members[static_cast<std::size_t>(peer)];
    Streams taken;
    taken.push_back(std::exchange(member.stream, std::make_unique<AbsentStream>()));
    for (auto& lane : member.lanes) {
      // What needs no connection exists from the start.
      if (lane->traits().carries == Stream::Carries::kDataOnly) continue;
      taken.push_back(std::exchange(lane, std::make_unique<AbsentStream>()));
    }
    return taken;
  };
  for (EngineConfig& config : configs) {
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
      throw std::system_error(errno, std::generic_category(), "socketpair");
    }
    requests_.emplace_back(ends[0]);
    config.connection_requests = Fd(ends[1]);
    const int rank = config.rank;
    const int here = config.members[static_cast<std::size_t>(rank)].host;
    for (int peer = rank + 1; peer < config.size(); ++peer) {
      const bool remote = config.members[static_cast<std::size_t>(peer)].host != here;
      if (remote && !connected(rank, peer))
        streams_[{rank, peer}] = {take(rank, peer), take(peer, rank)};
    }
  }
  pairs_ = streams_.size();
}

Switchboard::~Switchboard() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(stop_.get(), &one, sizeof one);
  if (thread_.joinable()) thread_.join();
}

void Switchboard::serve(Cluster& cluster) {
  thread_ = std::thread([this, &cluster] { run(cluster); });
}

void Switchboard::refuse(const std::string& reason) {
  reason_ = reason;
  refuses_ = true;
}

void Switchboard::run(Cluster& cluster) {
  std::vector<pollfd> polled{{stop_.get(), POLLIN, 0}};
  for (const Fd& fd : requests_) polled.push_back({fd.get(), POLLIN, 0});
  while (::poll(polled.data(), polled.size(), -1) > 0 && (polled[0].revents & POLLIN) == 0) {
    for (std::size_t i = 1; i < polled.size(); ++i) {
      if (polled[i].revents == 0) continue;
      std::uint32_t rank = 0;
      if (::recv(polled[i].fd, &rank, sizeof rank, MSG_WAITALL) == sizeof rank) {
        connect(cluster, static_cast<int>(i) - 1, static_cast<int>(rank));
      } else {
        polled[i].fd = -1;  // the engine has ended
      }
    }
  }
}

void Switchboard::connect(Cluster& cluster, int from, int to) {
  if (refuses_) return cluster.engine(from).fail_connection(to, reason_);
  const auto found = streams_.find(std::minmax(from, to));
  if (found == streams_.end()) return;  // the other rank has asked, too
  auto [low, high] = std::move(found->second);
  const auto [lower, higher] = found->first;
  streams_.erase(found);
  cluster.engine(lower).add_connection(higher, std::move(low));
  cluster.engine(higher).add_connection(lower, std::move(high));
  ++made_;
}

}  // namespace horoplug::testing
