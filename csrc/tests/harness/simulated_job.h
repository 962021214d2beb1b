// A job without engines: the process sets of its ranks, under a random scheduler that delays and
// reorders programs, messages and the execution of batches as far as an engine could.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "engine/execution/process_set.h"
#include "harness/programs.h"

namespace horoplug::testing {

class SimulatedJob {
 public:
  // `programs`: by rank. Without any, the test submits the operations.
  SimulatedJob(const std::vector<int>& hosts, const Negotiator::Options& options,
               std::vector<Program> programs = {});

  // A batch that a rank has run.
  struct Done {
    std::uint32_t plan;
    std::uint64_t number;
    std::vector<std::string> names;
    Tuning tuning;
    bool operator==(const Done&) const = default;
  };
  struct Rank {
    std::unique_ptr<ProcessSet> set;
    Program program;
    std::size_t at = 0;  // the next action of the program
    std::set<std::string> in_flight;
    std::uint64_t dependency_stage = 0;
    bool result_observed = false;
    std::vector<Negotiator::Decision> decided;
    std::vector<Done> done;
    std::uint64_t withdrawn = 0;  // batches
    bool finished() const { return at == program.size(); }
    const Negotiator& negotiator() const { return set->negotiator(); }
  };
  Rank& operator[](int rank) { return ranks_[static_cast<std::size_t>(rank)]; }
  int size() const { return static_cast<int>(ranks_.size()); }
  std::uint64_t messages() const { return messages_; }
  std::uint64_t bytes() const { return bytes_; }
  // Whether every rank has reached a batch.
  bool is_reached(const Batch& batch) const;
  // Whether all programs have ended.
  bool finished() const;

  void submit(int rank, const std::string& name, const Signature& signature);
  void join(int rank);

  // Runs one randomly chosen event of those that are possible now; false if there is none before a
  // deadline of a plan expires.
  bool happen(Random& random);
  // Expires the plan deadline of a random rank, as the watchdog does; false if no rank has one.
  bool expire_deadline(Random& random);

 private:
  bool can_execute(const Rank& rank) const;
  void execute(Rank& me);
  static bool can_run_program(const Rank& rank);
  void run_program(int rank);
  void deliver(int from, int to);
  bool negotiate(int rank);
  void apply(Rank& me, Negotiator::Decision& decision) const;

  std::deque<Rank> ranks_;
  std::map<std::pair<int, int>, std::deque<Bytes>> channels_;  // keep the order within each pair
  std::uint64_t messages_ = 0;
  std::uint64_t bytes_ = 0;
  RunningTime now_;
};

// The hosts of a job's ranks.
inline std::vector<int> random_hosts(Random& random, int ranks) {
  const int hosts = 1 + below(random, ranks);
  std::vector<int> result;
  for (int rank = 0; rank < ranks; ++rank) result.push_back(below(random, hosts));
  return result;
}

}  // namespace horoplug::testing
