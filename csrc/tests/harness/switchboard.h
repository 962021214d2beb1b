// Makes the connections that engines ask for while they run, in place of the program's thread.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "harness/cluster.h"

namespace horoplug::testing {

class Switchboard {
 public:
  using Connected = std::function<bool(int a, int b)>;

  // Takes the connections between ranks on different hosts out of `configs`, unless `connected`.
  Switchboard(std::vector<EngineConfig>& configs, const Connected& connected);
  ~Switchboard();

  // Serves the engines of these configurations until destroyed.
  void serve(Cluster& cluster);
  // Requests from now on fail with this reason.
  void refuse(const std::string& reason);

  // The number of pairs of ranks that were connected on demand, and that could have been.
  std::size_t made() const { return made_; }
  std::size_t pairs() const { return pairs_; }

 private:
  using Pair = std::pair<int, int>;  // the lower rank first
  using Streams = std::vector<std::unique_ptr<Stream>>;
  void run(Cluster& cluster);
  void connect(Cluster& cluster, int from, int to);

  std::map<Pair, std::array<Streams, 2>> streams_;  // not connected yet
  std::vector<Fd> requests_;                        // by rank
  std::size_t pairs_ = 0;
  std::atomic<std::size_t> made_ = 0;
  std::atomic<bool> refuses_ = false;
  std::string reason_;
  Fd stop_;
  std::thread thread_;
};

// Whether two ranks of a job, each on a host of its own, are connected at the start: at distances
// that are powers of two, and in the tree of all ranks.
inline Switchboard::Connected neighbours(int ranks) {
  return [ranks](int a, int b) {
    const auto [low, high] = std::minmax(a, b);
    const auto distance = static_cast<unsigned>(std::min(high - low, ranks - high + low));
    return std::has_single_bit(distance) || (high - 1) / Topology::kRadix == low;
  };
}

}  // namespace horoplug::testing
