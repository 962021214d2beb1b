// The stall inspections of all ranks of a job, connected in memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "controller/stalls/stall_inspection.h"
#include "controller/state/topology.h"

namespace horoplug {

class SimulatedInspection {
 public:
  using State = std::function<RankReport(int rank)>;

  SimulatedInspection(int ranks, int ranks_per_host) {
    std::vector<int> hosts;
    for (int rank = 0; rank < ranks; ++rank) hosts.push_back(rank / ranks_per_host);
    const Topology topology(hosts);
    for (int rank = 0; rank < ranks; ++rank) inspections_.emplace_back(topology.position(rank));
  }

  // An inspection of ranks in these states, as rank 0 sees it.
  Report run(const State& state) {
    std::vector<std::uint64_t> by_rank(inspections_.size());
    bytes_ = messages_ = largest_ = 0;
    inspections_[0].begin(Seconds(5));
    std::deque<std::size_t> active{0};
    while (!active.empty()) {
      const std::size_t rank = active.front();
      active.pop_front();
      StallInspection& inspection = inspections_[rank];
      while (inspection.wants_answer()) inspection.answer(state(static_cast<int>(rank)));
      for (const auto& [to, message] : inspection.take_outgoing()) {
        const auto receiver = static_cast<std::size_t>(to);
        ++messages_;
        bytes_ += message.size();
        largest_ = std::max(largest_, message.size());
        by_rank[rank] += message.size();
        by_rank[receiver] += message.size();
        deliver(static_cast<int>(rank), inspections_[receiver], message);
        active.push_back(receiver);
      }
    }
    busiest_ = *std::max_element(by_rank.begin(), by_rank.end());
    auto result = inspections_[0].take_result();
    if (!result) throw std::logic_error("the inspection has no result");
    return *std::move(result);
  }

  // Of the last inspection.
  std::uint64_t messages() const { return messages_; }
  std::uint64_t bytes() const { return bytes_; }
  std::size_t largest() const { return largest_; }  // bytes of the largest message
  // The bytes that the rank with the most of them has sent and received.
  std::uint64_t busiest() const { return busiest_; }

  std::vector<int> ranks() const {
    std::vector<int> ranks(inspections_.size());
    std::iota(ranks.begin(), ranks.end(), 0);
    return ranks;
  }

 private:
  static void deliver(int from, StallInspection& to, const Bytes& message) {
    Reader reader(message);
    if (read_head(reader).kind == MessageKind::kInspection) {
      to.receive(from, decode<InspectionQuestion>(reader));
    } else {
      to.receive(from, decode<Report>(reader));
    }
  }

  std::deque<StallInspection> inspections_;
  std::uint64_t messages_ = 0;
  std::uint64_t bytes_ = 0;
  std::size_t largest_ = 0;
  std::uint64_t busiest_ = 0;
};

}  // namespace horoplug
