// Collectives of 8 to 4,096 ranks in the network model of network_bench, in virtual time:
//     rounds_bench [delay in ms [Mbit/s of a host [ranks per host [most ranks]]]]
// Runs the algorithms themselves, each rank's coroutine over its own links, and prints the chosen
// algorithm, the rounds (the time in units of the delay, without limit of the bandwidth), the most
// bytes that a host sends, and the time, each beside the textbook bound for hosts that send one
// message at a time: ceil(log2(hosts)) rounds, the bytes that every host has to send, and the sum
// of the times of both. Algorithms with several messages at once can be faster. Memory takes no
// time. 4,096 ranks need 2 GB.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <queue>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/host_grid.h"
#include "collectives/collective.h"
#include "collectives/partition.h"
#include "transport/link.h"

namespace horoplug {
namespace {

struct NetworkModel {
  double delay;  // microseconds that every message takes one way
  double byte;   // microseconds that a host's interface takes for each byte
};

// One direction of a link. Payloads arrive as zeros.
struct Direction {
  struct Packet {
    std::array<std::byte, sizeof(FrameHeader)> header;
    std::size_t payload;
    double at;
    std::size_t read = 0;
  };
  std::deque<Packet> packets;
  int to = 0;            // the rank that reads it
  Link* link = nullptr;  // by which it reads
};

class Simulation;

class VirtualStream final : public Stream {
 public:
  VirtualStream(Simulation& simulation, int from, Direction& out, Direction& in)
      : simulation_(simulation), from_(from), out_(out), in_(in) {}
  std::size_t write(const iovec* parts, int count) override;
  std::ptrdiff_t read(void* data, std::size_t bytes) override;
  void close_write() override {}
  Traits traits() const override { return {WakeUp::kDoorbell}; }

 private:
  Simulation& simulation_;
  const int from_;
  Direction& out_;
  Direction& in_;
};

struct Work {
  OpKind kind;
  std::size_t bytes;
};

// Ranks on hosts of equal size, with links between those that exchange messages in the algorithms
// for this number of ranks, a power of two.
class Simulation {
 public:
  Simulation(const NetworkModel& costs, int ranks, int per_host);

  struct Result {
    std::string algorithm;
    double time = 0;            // until the last rank ends
    std::size_t most_sent = 0;  // by a host
  };
  Result run(const NetworkModel& network, const Work& work);

  double now() const { return now_; }
  // Returns the time of arrival.
  double transmit(int from, Direction& to, std::size_t bytes);

 private:
  struct Rank {
    std::map<int, std::unique_ptr<Link>> links;
    LinkActivity activity;
    std::vector<Link*> by_index;
    std::unique_ptr<HostMemory> memory;
    std::unique_ptr<Comm> comm;
    std::unique_ptr<Layout> layout;
    Call call;
    std::unique_ptr<Fiber> fiber;
    bool done = false;
  };
  struct Arrival {
    double at;
    std::uint64_t number;
    Direction* direction;
    bool operator<(const Arrival& other) const {
      return std::pair(at, number) > std::pair(other.at, other.number);
    }
  };
  std::set<int> peers_of(int rank) const;
  void connect(int a, int b);
  void start(int rank, const Work& work);
  bool advance(int rank);
  void advance_host(int rank);
  Rank& at(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }

  const int per_host_;
  HostGrid grid_;
  std::vector<Rank> ranks_;
  std::deque<Direction> directions_;
  std::priority_queue<Arrival> arrivals_;
  std::uint64_t arrived_ = 0;
  NetworkModel network_{};
  double now_ = 0;
  std::uint64_t batch_ = 0;
  std::vector<double> free_;        // by host: when its interface is free
  std::vector<std::size_t> sent_;   // by host
  std::vector<std::byte> buffer_;   // the tensors of all ranks
  std::vector<std::size_t> parts_;  // their sizes by rank
};

std::size_t VirtualStream::write(const iovec* parts, int count) {
  Direction::Packet packet{};
  std::memcpy(packet.header.data(), parts[0].iov_base, packet.header.size());
  packet.payload = count > 1 ? parts[1].iov_len : 0;
  packet.at = simulation_.transmit(from_, out_, packet.payload);
  out_.packets.push_back(packet);
  return packet.header.size() + packet.payload;
}

std::ptrdiff_t VirtualStream::read(void* data, std::size_t bytes) {
  if (in_.packets.empty() || in_.packets.front().at > simulation_.now()) return 0;
  Direction::Packet& packet = in_.packets.front();
  std::size_t got = 0;
  if (packet.read < packet.header.size()) {
    got = std::min(bytes, packet.header.size() - packet.read);
    std::memcpy(data, packet.header.data() + packet.read, got);
  } else {
    got = std::min(bytes, packet.header.size() + packet.payload - packet.read);
    std::memset(data, 0, got);
  }
  packet.read += got;
  if (packet.read == packet.header.size() + packet.payload) in_.packets.pop_front();
  return static_cast<std::ptrdiff_t>(got);
}

std::vector<int> hosts_of(int ranks, int per_host) {
  std::vector<int> hosts;
  for (int rank = 0; rank < ranks; ++rank) hosts.push_back(rank / per_host);
  return hosts;
}

Simulation::Simulation(const NetworkModel& model, int ranks, int per_host)
    : per_host_(per_host),
      grid_(hosts_of(ranks, per_host)),
      ranks_(static_cast<std::size_t>(ranks)) {
  for (int rank = 0; rank < ranks; ++rank) {
    for (const int peer : peers_of(rank)) {
      if (!at(rank).links.contains(peer)) connect(rank, peer);
    }
  }
  Costs costs;
  costs.stream = {model.delay, model.byte};
  for (int host = 0; host < grid_.hosts(); ++host) {
    const std::vector<int>& here = grid_.members()[static_cast<std::size_t>(host)];
    std::vector<Arena> arenas;
    std::vector<std::shared_ptr<Doorbell>> bells;
    for (std::size_t i = 0; i < here.size() && per_host > 1; ++i) {
      arenas.emplace_back(Segment::allocate(Arena::kSegmentBytes));
      bells.push_back(std::make_shared<Doorbell>());
    }
    for (const int rank : here) {
      Rank& me = at(rank);
      std::vector<std::vector<Link*>> lanes(static_cast<std::size_t>(ranks));
      for (const auto& [peer, link] : me.links) {
        lanes[static_cast<std::size_t>(peer)] = {link.get()};
        link->report_to(me.activity, static_cast<int>(me.by_index.size()));
        me.by_index.push_back(link.get());
      }
      if (per_host > 1) {
        me.memory = std::make_unique<HostMemory>(grid_.local_rank(rank), arenas, bells, here);
      }
      me.comm = std::make_unique<Comm>(rank, std::move(lanes),
                                       grid_.hosts() == 1 ? me.memory.get() : nullptr, costs);
      me.comm->set_hosts(grid_, me.memory.get(), true);
    }
  }
}

// In rings, trees and exchanges at the distance of a power of two; all, if they are few.
std::set<int> Simulation::peers_of(int rank) const {
  std::set<int> peers;
  const int ranks = static_cast<int>(ranks_.size());
  const auto add = [&](int host, int local_rank) {
    const int wrapped = (host + grid_.hosts()) % grid_.hosts();
    peers.insert(
        grid_.members()[static_cast<std::size_t>(wrapped)][static_cast<std::size_t>(local_rank)]);
  };
  const int host = grid_.host(rank);
  const int local = grid_.local_rank(rank);
  for (int distance = 1; distance < grid_.hosts(); distance *= 2) {
    for (const int other : {host + distance, host - distance, host ^ distance}) add(other, local);
  }
  for (int distance = 1; distance < ranks; distance *= 2) {  // of barriers, which know no hosts
    peers.insert((rank + distance) % ranks);
    peers.insert((rank + ranks - distance) % ranks);
  }
  add(host + 1, 0);
  if (local == 0) add(host - 1, per_host_ - 1);
  for (const int other : grid_.host_ranks(rank)) peers.insert(other);
  for (int other = 0; other < ranks && ranks <= 64; ++other) peers.insert(other);
  peers.erase(rank);
  return peers;
}

void Simulation::connect(int a, int b) {
  Direction& there = directions_.emplace_back();
  Direction& back = directions_.emplace_back();
  there.to = b;
  back.to = a;
  const auto end = [&](int from, int to, Direction& out, Direction& in) {
    auto link = std::make_unique<Link>(to, std::make_unique<VirtualStream>(*this, from, out, in),
                                       [](int, const Bytes&) {});
    in.link = link.get();
    at(from).links.emplace(to, std::move(link));
  };
  end(a, b, there, back);
  end(b, a, back, there);
}

double Simulation::transmit(int from, Direction& to, std::size_t bytes) {
  const auto host = static_cast<std::size_t>(grid_.host(from));
  double arrival = now_;
  if (grid_.host(to.to) != grid_.host(from)) {
    free_[host] = std::max(free_[host], now_) + static_cast<double>(bytes) * network_.byte;
    sent_[host] += bytes;
    arrival = free_[host] + network_.delay;
  }
  arrivals_.push({arrival, ++arrived_, &to});
  return arrival;
}

void Simulation::start(int rank, const Work& work) {
  Rank& me = at(rank);
  me.comm->begin({.set = 0, .epoch = 0, .batch = batch_, .check = batch_});
  me.call = Call{};
  me.call.kind = work.kind;
  me.call.dtype = DType::kFloat32;
  me.call.input = me.call.output = buffer_.data();
  if (work.kind == OpKind::kAllgather || work.kind == OpKind::kReducescatter) {
    me.call.receive_bytes = parts_;
  }
  if (work.kind != OpKind::kAllgather && work.kind != OpKind::kBarrier) {
    me.layout = std::make_unique<Layout>(DType::kFloat32, 1.0);
    me.layout->add(buffer_.data(), buffer_.data(), work.bytes);
    me.call.layout = me.layout.get();
    me.call.reduce =
        kernels().reduce[static_cast<int>(ReduceOp::kSum)][static_cast<int>(DType::kFloat32)];
  }
  me.fiber =
      std::make_unique<Fiber>(choose_algorithm(*me.comm, me.call, nullptr).run(*me.comm, me.call));
  me.done = false;
}

// Runs a rank as far as possible. Returns whether it has moved.
bool Simulation::advance(int rank) {
  Rank& me = at(rank);
  bool moved = false;
  for (bool again = true; again;) {
    again = false;
    if (!me.done) {
      me.done = me.fiber->poll();
      again = me.fiber->advanced();
    }
    for (const int index : std::exchange(me.activity.writers, {})) {
      Link& link = *me.by_index[static_cast<std::size_t>(index)];
      while (link.wants_write() && link.pump_write()) again = true;
      link.unlist();
    }
    moved |= again;
  }
  return moved;
}

// A rank's progress may be what the others of its host wait for.
void Simulation::advance_host(int rank) {
  if (!advance(rank) || per_host_ == 1) return;
  for (bool again = true; again;) {
    again = false;
    for (const int other : grid_.host_ranks(rank)) again |= advance(other);
  }
}

Simulation::Result Simulation::run(const NetworkModel& network, const Work& work) {
  const auto ranks = static_cast<int>(ranks_.size());
  network_ = network;
  now_ = 0;
  ++batch_;
  free_.assign(static_cast<std::size_t>(grid_.hosts()), 0);
  sent_.assign(static_cast<std::size_t>(grid_.hosts()), 0);
  buffer_.resize(work.bytes);
  parts_.clear();
  for (const Part& part : split_evenly(work.bytes, ranks, sizeof(float))) {
    parts_.push_back(part.bytes);
  }
  for (int rank = 0; rank < ranks; ++rank) start(rank, work);
  for (int rank = 0; rank < ranks; ++rank) advance_host(rank);
  while (!arrivals_.empty()) {
    const Arrival next = arrivals_.top();
    arrivals_.pop();
    now_ = next.at;
    while (next.direction->link->pump_read()) {
    }
    advance_host(next.direction->to);
  }
  Result result{choose_algorithm(*at(0).comm, at(0).call, nullptr).name, now_,
                *std::max_element(sent_.begin(), sent_.end())};
  for (Rank& me : ranks_) {
    if (!me.done) throw std::runtime_error("a rank did not end");
    me.fiber.reset();
    me.comm->end();
  }
  return result;
}

// The bytes that some host has to send, and as many rounds as it takes to reach all hosts.
struct Bound {
  double rounds;
  double bytes;
};

Bound bound_of(const Work& work, double hosts) {
  const auto all = static_cast<double>(work.bytes);
  const double shares = (hosts - 1) / hosts * all;
  double bytes = all;
  if (work.kind == OpKind::kAllgather || work.kind == OpKind::kReducescatter) bytes = shares;
  if (work.kind == OpKind::kAllreduce) bytes = 2 * shares;
  return {std::ceil(std::log2(hosts)), bytes};
}

void bench(const NetworkModel& network, int per_host, int most) {
  std::printf("# %.3g ms one way, %.0f Mbit/s, %d ranks per host\n", network.delay / 1e3,
              8 / network.byte, per_host);
  std::printf("#%-13s %8s %6s %-13s %7s %5s %9s %9s %9s %9s %6s\n", "operation", "bytes", "ranks",
              "algorithm", "rounds", "bound", "sent (B)", "bound", "time (ms)", "bound", "ratio");
  constexpr std::size_t kLarge = 256 << 10;
  for (int ranks = 8; ranks <= most; ranks *= ranks < 64 ? 8 : 4) {
    if (ranks <= per_host) continue;
    Simulation simulation(network, ranks, per_host);
    const std::size_t counts = static_cast<std::size_t>(ranks) * 8;
    for (const Work& work : {Work{OpKind::kBarrier, 0}, Work{OpKind::kAllgather, counts},
                             Work{OpKind::kAllgather, kLarge}, Work{OpKind::kReducescatter, counts},
                             Work{OpKind::kReducescatter, kLarge}, Work{OpKind::kBroadcast, 8},
                             Work{OpKind::kBroadcast, kLarge}, Work{OpKind::kAllreduce, 8},
                             Work{OpKind::kAllreduce, kLarge}}) {
      const double rounds = simulation.run({1, 0}, work).time;
      const auto result = simulation.run(network, work);
      const Bound bound = bound_of(work, static_cast<double>(ranks) / per_host);
      const double least = bound.rounds * network.delay + bound.bytes * network.byte;
      std::printf(" %-13s %8zu %6d %-13s %7.0f %5.0f %9zu %9.0f %9.3f %9.3f %6.2f\n",
                  op_kind_name(work.kind), work.bytes, ranks, result.algorithm.c_str(), rounds,
                  bound.rounds, result.most_sent, bound.bytes, result.time / 1e3, least / 1e3,
                  result.time / least);
      std::fflush(stdout);
    }
  }
}

}  // namespace
}  // namespace horoplug

int main(int argc, char** argv) {
  const auto argument = [&](int index, double otherwise) {
    return argc > index ? std::stod(argv[index]) : otherwise;
  };
  const double delay = argument(1, 0.05) * 1e3;
  const double byte = 8 / argument(2, 10'000);
  horoplug::bench({delay, byte}, static_cast<int>(argument(3, 1)),
                  static_cast<int>(argument(4, 4096)));
  return 0;
}
