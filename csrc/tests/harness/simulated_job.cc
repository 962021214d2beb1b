#include "harness/simulated_job.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <functional>
#include <numeric>

#include "controller/state/topology.h"
#include "engine/operations/submission.h"
#include "harness/engine_parts.h"

namespace horoplug::testing {
namespace {

constexpr std::uint32_t kSimulatedSet = 3;

// A batch ends once every rank has reached it.
class Reached final : public Waitable {
 public:
  Reached(const SimulatedJob& job, const Batch& batch) : job_(job), batch_(batch) {}
  bool ready() override { return job_.is_reached(batch_); }
  void blame(std::vector<int>&) const override {}
  static Task wait(const SimulatedJob& job, const Batch& batch) { co_await Reached(job, batch); }

 private:
  const SimulatedJob& job_;
  const Batch& batch_;
};

}  // namespace

SimulatedJob::SimulatedJob(const std::vector<int>& hosts, const Negotiator::Options& options,
                           std::vector<Program> programs) {
  programs.resize(hosts.size());
  const Topology topology(hosts);
  std::vector<int> all(hosts.size());
  std::iota(all.begin(), all.end(), 0);
  for (const int rank : all) {
    auto comm =
        std::make_unique<Comm>(rank, std::vector<std::vector<Link*>>(hosts.size()), nullptr);
    Rank& me = ranks_.emplace_back();
    me.program = std::move(programs[static_cast<std::size_t>(rank)]);
    me.set = std::make_unique<ProcessSet>(
        make_members(kSimulatedSet, all, rank), nullptr, topology.position(rank), options,
        std::move(comm), [this](Comm&, Batch& batch) { return Reached::wait(*this, batch); });
  }
}

bool SimulatedJob::finished() const {
  return std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& r) { return r.finished(); });
}

// ---- the scheduler ----

bool SimulatedJob::happen(Random& random) {
  std::vector<int> order(ranks_.size());
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  bool moved = negotiate(order.front());
  std::vector<std::function<void()>> choices;
  for (auto& [pair, queue] : channels_) {
    if (!queue.empty()) {
      choices.emplace_back([this, pair = pair] { deliver(pair.first, pair.second); });
    }
  }
  for (const int rank : order) {
    Rank& me = (*this)[rank];
    if (can_run_program(me)) choices.emplace_back([this, rank] { run_program(rank); });
    if (can_execute(me)) choices.emplace_back([this, &me] { execute(me); });
  }
  if (!choices.empty()) {
    choices[static_cast<std::size_t>(below(random, static_cast<int>(choices.size())))]();
    return true;
  }
  for (const int rank : order) moved |= negotiate(rank);
  return moved;
}

bool SimulatedJob::expire_deadline(Random& random) {
  std::vector<ProcessSet*> candidates;
  for (Rank& rank : ranks_) {
    if (rank.negotiator().held_up() || rank.negotiator().waits_in_plan()) {
      candidates.push_back(rank.set.get());
    }
  }
  if (candidates.empty()) return false;
  const int chosen = below(random, static_cast<int>(candidates.size()));
  candidates[static_cast<std::size_t>(chosen)]->break_plan();
  return true;
}

// ---- programs ----

void SimulatedJob::submit(int rank, const std::string& name, const Signature& signature) {
  Rank& me = (*this)[rank];
  auto operation = std::make_shared<Operation>();
  operation->members = me.set->members();
  operation->identity = make_identity(name, signature);
  if (std::exchange(me.result_observed, false)) ++me.dependency_stage;
  operation->dependency_stage = me.dependency_stage;
  if (me.set->accept(operation, now_).ok()) me.in_flight.insert(name);
}

void SimulatedJob::join(int rank) {
  Rank& me = (*this)[rank];
  const OperationPtr operation = make_administrative(OpKind::kJoin, me.set->members(), {});
  if (me.set->accept(operation, now_).ok()) me.in_flight.insert(operation->name());
}

bool SimulatedJob::can_run_program(const Rank& rank) {
  if (rank.finished()) return false;
  const Action& action = rank.program[rank.at];
  return action.kind != Action::Kind::kWait || !rank.in_flight.contains(action.name);
}

void SimulatedJob::run_program(int rank) {
  Rank& me = (*this)[rank];
  const Action& action = me.program[me.at++];
  switch (action.kind) {
    case Action::Kind::kSubmit:
      REQUIRE(!me.in_flight.contains(action.name));
      return submit(rank, action.name, action.signature);
    case Action::Kind::kJoin:
      REQUIRE(!me.in_flight.contains(kJoinName));
      return join(rank);
    case Action::Kind::kWait:
      me.result_observed = true;
  }
}

// ---- batches ----

bool SimulatedJob::is_reached(const Batch& batch) const {
  const auto is_it = [&](const auto& other) {
    return other.number == batch.number && other.plan == batch.plan;
  };
  return std::all_of(ranks_.begin(), ranks_.end(), [&](const Rank& rank) {
    const Batch* const running = rank.set->executor().running();
    return (running != nullptr && is_it(*running)) ||
           std::any_of(rank.done.rbegin(), rank.done.rend(), is_it);
  });
}

bool SimulatedJob::can_execute(const Rank& rank) const {
  const Executor& executor = rank.set->executor();
  return !executor.idle() && (executor.running() == nullptr || is_reached(*executor.running()));
}

void SimulatedJob::execute(Rank& me) {
  const auto batch = me.set->poll();
  if (!batch) return;
  me.set->batch_done(*batch, now_ += Seconds(1));
  Done& done = me.done.emplace_back(Done{batch->plan, batch->number, {}, batch->tuning});
  for (const OperationPtr& operation : batch->operations) {
    done.names.push_back(operation->name());
    me.in_flight.erase(operation->name());
  }
}

// ---- messages and decisions ----

void SimulatedJob::deliver(int from, int to) {
  auto& queue = channels_[{from, to}];
  const Bytes message = std::move(queue.front());
  queue.pop_front();
  Reader reader(message);
  const MessageHead head = read_head(reader);
  REQUIRE(head.set == kSimulatedSet);
  (*this)[to].set->receive(from, head.kind, reader);
  REQUIRE(reader.empty());  // the negotiator has such messages
}

// What an engine does whenever it is awake.
bool SimulatedJob::negotiate(int rank) {
  Rank& me = (*this)[rank];
  auto [messages, decisions, trials] = negotiated(*me.set);
  for (auto& [to, message] : messages) {
    ++messages_;
    bytes_ += message.size();
    channels_[{rank, to}].push_back(std::move(message));
  }
  for (auto& decision : decisions) apply(me, decision);
  return !messages.empty() || !decisions.empty();
}

void SimulatedJob::apply(Rank& me, Negotiator::Decision& decision) const {
  me.decided.push_back(decision);
  const std::size_t pending = me.set->pending().size();
  const auto applied = me.set->apply(decision, now_, [](Batch&) {});
  me.withdrawn += me.set->pending().size() > pending;
  for (const OperationPtr& operation : applied.ended) me.in_flight.erase(operation->name());
}

}  // namespace horoplug::testing
