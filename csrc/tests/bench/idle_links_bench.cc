// What idle links cost a step of an engine: a mesh of N links over Unix sockets, of which one
// carries a small control message in each step, and steps without any event.
//     idle_links_bench [links ...]        by default 64 and 4000
// Prints medians of rounds in which the meshes take turns. Two descriptors for each link.
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "base/time.h"
#include "transport/frame.h"
#include "transport/mesh.h"
#include "transport/tcp/socket_stream.h"

namespace horoplug {
namespace {

constexpr int kRounds = 51;
constexpr int kSteps = 2000;  // in each round

class Bench {
 public:
  explicit Bench(int links) {
    std::vector<std::vector<std::unique_ptr<Stream>>> lanes(static_cast<std::size_t>(links) + 1);
    for (std::size_t rank = 1; rank < lanes.size(); ++rank) {
      int ends[2];
      if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
        throw std::system_error(errno, std::generic_category(), "socketpair");
      }
      lanes[rank].push_back(std::make_unique<SocketStream>(Fd(ends[0])));
      peers_.emplace_back(ends[1]);
    }
    mesh_ = std::make_unique<Mesh>(std::move(lanes), std::make_shared<Doorbell>(),
                                   [this](int, const Bytes&) { ++received_; });
    header_.kind = FrameHeader::kControl;
    header_.bytes = sizeof payload_;
  }

  // Seconds for a step in which a message arrives and one is sent.
  double busy() {
    const SteadyTime began = steady_now();
    for (int i = 0; i < kSteps; ++i) {
      send_from_peer();
      mesh_->send_control(1, Bytes(sizeof payload_));
      const auto before = received_;
      while (received_ == before) mesh_->pump();
      char sink[256];
      [[maybe_unused]] const auto read = ::read(peers_[0].get(), sink, sizeof sink);
    }
    return (steady_now() - began).count() / kSteps;
  }

  // Seconds for a step without any event.
  double idle() {
    const SteadyTime began = steady_now();
    for (int i = 0; i < kSteps; ++i) mesh_->pump();
    return (steady_now() - began).count() / kSteps;
  }

 private:
  void send_from_peer() {
    std::byte frame[sizeof header_ + sizeof payload_];
    std::memcpy(frame, &header_, sizeof header_);
    std::memcpy(frame + sizeof header_, &payload_, sizeof payload_);
    if (::write(peers_[0].get(), frame, sizeof frame) != sizeof frame) std::abort();
  }

  std::vector<Fd> peers_;
  std::unique_ptr<Mesh> mesh_;
  FrameHeader header_;
  std::uint64_t payload_ = 0;
  long received_ = 0;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

int run(const std::vector<int>& counts) {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
  std::vector<std::unique_ptr<Bench>> benches;
  for (const int links : counts) benches.push_back(std::make_unique<Bench>(links));
  std::vector<std::vector<double>> busy(counts.size());
  std::vector<std::vector<double>> idle(counts.size());
  for (int round = 0; round < kRounds; ++round) {
    for (std::size_t i = 0; i < counts.size(); ++i) {
      busy[i].push_back(benches[i]->busy());
      idle[i].push_back(benches[i]->idle());
    }
  }
  std::printf("links   a step with a message each way   ratio   a step without an event   ratio\n");
  for (std::size_t i = 0; i < counts.size(); ++i) {
    std::printf("%5d   %25.2f us   %5.2f   %20.2f us   %5.2f\n", counts[i], median(busy[i]) * 1e6,
                median(busy[i]) / median(busy[0]), median(idle[i]) * 1e6,
                median(idle[i]) / median(idle[0]));
  }
  return 0;
}

}  // namespace
}  // namespace horoplug

int main(int argc, char** argv) {
  std::vector<int> counts;
  for (int i = 1; i < argc; ++i) counts.push_back(std::stoi(argv[i]));
  if (counts.empty()) counts = {64, 4000};
  return horoplug::run(counts);
}
