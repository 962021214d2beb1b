// Allreduce of whole engines over a modelled network with a long delay, which virtual devices of a
// kernel without netem do not have:
//     network_bench [delay in ms [Mbit/s of a host]]
// Prints the median time, busbw as a share of the link bandwidth, and the time in round trips for
// each step of recursive doubling.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <queue>
#include <thread>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "engine/operations/submission.h"
#include "transport/doorbell.h"
#include "transport/stream.h"

namespace horoplug {
namespace {

struct LinkModel {
  double delay;        // seconds that every byte takes one way
  double bandwidth;    // bytes per second that a host sends at most, on all its links together
  std::size_t window;  // bytes of a stream that may be sent and not yet read, as TCP's buffers
};

// Rings doorbells when data in flight arrives.
class Clock {
 public:
  using Time = std::chrono::steady_clock::time_point;

  Clock() : thread_([this](const std::stop_token& stop) { run(stop); }) {}
  void ring_at(Time when, std::shared_ptr<Doorbell> bell);

 private:
  struct Alarm {
    Time when;
    std::shared_ptr<Doorbell> bell;
    bool operator<(const Alarm& other) const { return when > other.when; }
  };
  void run(const std::stop_token& stop);

  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::priority_queue<Alarm> alarms_;
  std::jthread thread_;
};

// A network interface of a host: it sends one packet after the other.
struct Nic {
  std::mutex mutex;
  Clock::Time free;
};

void Clock::ring_at(Time when, std::shared_ptr<Doorbell> bell) {
  {
    std::lock_guard lock(mutex_);
    alarms_.push({when, std::move(bell)});
  }
  changed_.notify_one();
}

void Clock::run(const std::stop_token& stop) {
  std::unique_lock lock(mutex_);
  while (!stop.stop_requested()) {
    if (alarms_.empty()) {
      changed_.wait(lock, stop, [this] { return !alarms_.empty(); });
      continue;
    }
    const Time next = alarms_.top().when;
    if (std::chrono::steady_clock::now() < next) {
      changed_.wait_until(lock, stop, next, [&] { return alarms_.top().when < next; });
      continue;
    }
    const auto bell = alarms_.top().bell;
    alarms_.pop();
    lock.unlock();
    bell->ring();
    lock.lock();
  }
}

using std::chrono::duration;
using std::chrono::duration_cast;
using std::chrono::steady_clock;

Clock::Time after(Clock::Time from, double seconds) {
  return from + duration_cast<steady_clock::duration>(duration<double>(seconds));
}

// One direction of a link: the data that was written, and its time of arrival.
struct Direction {
  struct Packet {
    std::vector<std::byte> bytes;
    Clock::Time at;
  };
  std::mutex mutex;
  std::deque<Packet> packets;
  std::size_t read = 0;  // bytes of the first packet that are read
  std::size_t held = 0;  // bytes in all
  bool closed = false;
  bool writer_waits = false;
};

class ModelledStream final : public Stream {
 public:
  ModelledStream(const LinkModel& model, Clock& clock, std::shared_ptr<Nic> nic,
                 std::shared_ptr<Direction> out, std::shared_ptr<Direction> in,
                 std::shared_ptr<Doorbell> own, std::shared_ptr<Doorbell> peer)
      : model_(model),
        clock_(clock),
        nic_(std::move(nic)),
        out_(std::move(out)),
        in_(std::move(in)),
        own_(std::move(own)),
        peer_(std::move(peer)) {}
  ~ModelledStream() override { close_write(); }

  std::size_t write(const iovec* parts, int count) override {
    // The unit in which a link serves its streams in turn.
    constexpr std::size_t kPacketBytes = 16 * 1024;
    std::size_t taken = 0;
    std::lock_guard lock(out_->mutex);
    for (int i = 0; i < count; ++i) {
      const auto* data = static_cast<const std::byte*>(parts[i].iov_base);
      for (std::size_t left = parts[i].iov_len; left > 0;) {
        const std::size_t bytes = std::min({left, kPacketBytes, model_.window - out_->held});
        if (bytes == 0) {
          out_->writer_waits = true;
          return taken;
        }
        const Clock::Time arrival = after(departure(bytes), model_.delay);
        out_->packets.push_back({{data, data + bytes}, arrival});
        out_->held += bytes;
        clock_.ring_at(arrival, peer_);
        data += bytes;
        left -= bytes;
        taken += bytes;
      }
    }
    return taken;
  }

  std::ptrdiff_t read(void* data, std::size_t bytes) override {
    std::lock_guard lock(in_->mutex);
    if (in_->packets.empty()) return in_->closed ? kEnd : 0;
    auto* to = static_cast<std::byte*>(data);
    std::size_t got = 0;
    const Clock::Time now = steady_clock::now();
    while (got < bytes && !in_->packets.empty() && in_->packets.front().at <= now) {
      Direction::Packet& packet = in_->packets.front();
      const std::size_t part = std::min(bytes - got, packet.bytes.size() - in_->read);
      std::copy_n(packet.bytes.data() + in_->read, part, to + got);
      got += part;
      in_->read += part;
      if (in_->read < packet.bytes.size()) break;
      in_->read = 0;
      in_->packets.pop_front();
    }
    in_->held -= got;
    // The notice of free space takes the delay of the link, too.
    if (got > 0 && std::exchange(in_->writer_waits, false)) {
      clock_.ring_at(after(now, model_.delay), peer_);
    }
    return static_cast<std::ptrdiff_t>(got);
  }

  void close_write() override {
    {
      std::lock_guard lock(out_->mutex);
      out_->closed = true;
    }
    peer_->ring();
  }

  Traits traits() const override { return {WakeUp::kDoorbell}; }

 private:
  // The time at which the last of these bytes has left the interface.
  Clock::Time departure(std::size_t bytes) {
    std::lock_guard lock(nic_->mutex);
    nic_->free = after(std::max(nic_->free, steady_clock::now()),
                       static_cast<double>(bytes) / model_.bandwidth);
    return nic_->free;
  }

  const LinkModel model_;
  Clock& clock_;
  std::shared_ptr<Nic> nic_;
  std::shared_ptr<Direction> out_;
  std::shared_ptr<Direction> in_;
  std::shared_ptr<Doorbell> own_;
  std::shared_ptr<Doorbell> peer_;
};

// A pair of connected streams between two hosts, each with its network interface. Bells ring for
// the owners of the first and of the second stream.
std::pair<std::unique_ptr<Stream>, std::unique_ptr<Stream>> make_modelled_link(
    const LinkModel& model, Clock& clock, std::shared_ptr<Nic> first, std::shared_ptr<Nic> second,
    const std::shared_ptr<Doorbell>& first_bell, const std::shared_ptr<Doorbell>& second_bell) {
  const auto there = std::make_shared<Direction>();
  const auto back = std::make_shared<Direction>();
  auto a = std::make_unique<ModelledStream>(model, clock, std::move(first), there, back, first_bell,
                                            second_bell);
  auto b = std::make_unique<ModelledStream>(model, clock, std::move(second), back, there,
                                            second_bell, first_bell);
  return {std::move(a), std::move(b)};
}

std::vector<EngineConfig> make_hosts(const LinkModel& model, Clock& clock, std::size_t hosts) {
  std::vector<EngineConfig> configs(hosts);
  std::vector<std::shared_ptr<Nic>> nics;
  std::vector<std::shared_ptr<Doorbell>> bells;
  for (std::size_t rank = 0; rank < hosts; ++rank) {
    nics.push_back(std::make_shared<Nic>());
    bells.push_back(std::make_shared<Doorbell>());
  }
  for (std::size_t rank = 0; rank < hosts; ++rank) {
    configs[rank].rank = static_cast<int>(rank);
    configs[rank].log = Log(LogLevel::kFatal, nullptr);
    configs[rank].options.costs.stream = {model.delay * 1e6, 1e6 / model.bandwidth};
    configs[rank].members.resize(hosts);
    for (std::size_t peer = 0; peer < hosts; ++peer) {
      configs[rank].members[peer].host = static_cast<int>(peer);
      configs[rank].members[peer].doorbell = bells[peer];
    }
  }
  for (std::size_t a = 0; a < hosts; ++a) {
    for (std::size_t b = a + 1; b < hosts; ++b) {
      auto pair = make_modelled_link(model, clock, nics[a], nics[b], bells[a], bells[b]);
      configs[a].members[b].stream = std::move(pair.first);
      configs[b].members[a].stream = std::move(pair.second);
    }
  }
  return configs;
}

void run_on_all(std::size_t ranks, const std::function<void(std::size_t)>& body) {
  std::vector<std::jthread> threads;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&body, rank] { body(rank); });
  }
}

void allreduce(Engine& engine, std::vector<float>& data) {
  const auto count = static_cast<std::int64_t>(data.size());
  hp_tensor tensor{data.data(), data.data(), &count, 1, 0};
  hp_submission submission{};
  submission.struct_size = sizeof submission;
  submission.op = HP_ALLREDUCE;
  submission.dtype = HP_FLOAT32;
  submission.reduce_op = HP_SUM;
  submission.device = -1;
  submission.name = "x";
  submission.tensors = &tensor;
  submission.tensor_count = 1;
  const hp_handle handle = engine.submit(make_operation(submission, engine.members(0)));
  const Status status = engine.wait(handle, Seconds(120));
  engine.handles().release(handle);
  if (!status.ok()) throw Error(status.code, status.message);
}

void bench(const LinkModel& model, std::size_t hosts) {
  Clock clock;
  std::vector<std::unique_ptr<Engine>> engines;
  for (auto& config : make_hosts(model, clock, hosts)) {
    engines.push_back(std::make_unique<Engine>(std::move(config)));
  }
  for (auto& engine : engines) engine->wait_until_ready();
  const double ranks = static_cast<double>(hosts);
  std::printf("# %zu hosts, %.3g ms one way, %.0f Mbit/s\n", hosts, model.delay * 1e3,
              model.bandwidth * 8 / 1e6);
  std::printf("#%11s %10s %8s %22s\n", "size (B)", "time (ms)", "line (%)", "round trips per step");
  for (const std::size_t bytes : {4U, 1U << 10, 64U << 10, 1U << 20, 16U << 20, 64U << 20}) {
    const int iterations = bytes > (4 << 20) ? 3 : 9;
    std::vector<double> times;
    run_on_all(hosts, [&](std::size_t rank) {
      std::vector<float> data(bytes / sizeof(float), 0.0F);
      allreduce(*engines[rank], data);
      for (int i = 0; i < iterations; ++i) {
        const auto start = steady_clock::now();
        allreduce(*engines[rank], data);
        if (rank == 0) times.push_back(duration<double>(steady_clock::now() - start).count());
      }
    });
    std::sort(times.begin(), times.end());
    const double median = times[times.size() / 2];
    const double carried = 2 * (ranks - 1) / ranks * static_cast<double>(bytes);
    std::printf(" %11zu %10.2f %8.1f %22.2f\n", bytes, median * 1e3,
                100 * carried / median / model.bandwidth,
                median / (2 * model.delay) / std::ceil(std::log2(ranks)));
  }
  run_on_all(hosts, [&](std::size_t rank) { engines[rank]->shutdown(); });
}

}  // namespace
}  // namespace horoplug

int main(int argc, char** argv) {
  const double delay = (argc > 1 ? std::stod(argv[1]) : 5.0) / 1e3;
  const double bandwidth = (argc > 2 ? std::stod(argv[2]) : 1000.0) * 1e6 / 8;
  for (const std::size_t hosts : {2U, 4U}) horoplug::bench({delay, bandwidth, 8 << 20}, hosts);
  return 0;
}
