// Agreement on the members of the next generation, in simulated jobs: random failures, lost
// connections, arrivals and delays.
#include "controller/membership/membership.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "harness/cluster.h"

using namespace horoplug;

namespace {

using Event = Membership::Event;
using Kind = MembershipMessage::Kind;
using Ids = std::vector<ProcessId>;

Ids ids_of(const std::vector<MemberRecord>& members) {
  Ids ids;
  for (const MemberRecord& member : members) ids.push_back(member.id);
  return ids;
}

// Processes and the connections between them. A connection delivers in order and after any delay,
// and both ends notice after any delay that it is lost.
class Job {
 public:
  struct Process {
    explicit Process(Membership membership) : membership(std::move(membership)) {}
    Membership membership;
    bool alive = true;
    bool excluded = false;
    bool no_quorum = false;
    bool too_few = false;
    bool ended = false;
    std::uint64_t steps = 0;
    std::map<std::uint64_t, Ids> started;  // by generation
  };

  Job(std::uint64_t seed, std::size_t members, std::size_t least = 1, std::size_t most = SIZE_MAX)
      : random_(seed), least_(least), most_(most) {
    Ids all;
    for (ProcessId id = 1; id <= members; ++id) all.push_back(id);
    next_id_ = members + 1;
    add(kLauncher, all);
    for (const ProcessId id : all) {
      add(id, all);
      at(id).started[0] = all;
    }
  }

  Process& at(ProcessId id) { return *processes_.at(id); }
  bool runs(ProcessId id) { return at(id).alive && !at(id).excluded; }
  Membership& membership(ProcessId id) { return at(id).membership; }

  void kill(ProcessId id) { at(id).alive = false; }
  void cut(ProcessId one, ProcessId other) { cut_.insert(std::minmax(one, other)); }
  // A process notices that it cannot reach another one.
  void notice(ProcessId id, ProcessId peer) {
    if (!runs(id)) return;
    cut(id, peer);
    membership(id).lose(peer);
    collect(id);
  }
  ProcessId arrive() {
    const ProcessId id = next_id_++;
    add(id, {});
    membership(kLauncher).add_newcomer(id);
    collect(kLauncher);
    return id;
  }
  void admit(ProcessId id) {
    membership(id).admit();
    collect(id);
  }
  // Trains one step. It does not count if the generation has ended.
  void step(ProcessId id) {
    membership(id).set_steps(at(id).steps + 1);
    if (!at(id).ended) ++at(id).steps;
  }

  bool connected(ProcessId one, ProcessId other) {
    return runs(one) && runs(other) && !cut_.contains(std::minmax(one, other));
  }
  Ids running() {
    Ids ids;
    for (const auto& [id, process] : processes_) {
      if (id != kLauncher && runs(id)) ids.push_back(id);
    }
    return ids;
  }

  // Does one random thing that is under way. Returns whether there was any.
  bool advance() {
    std::vector<std::pair<ProcessId, ProcessId>> ready;
    for (const auto& [link, queue] : queues_) {
      if (!queue.empty()) ready.push_back(link);
    }
    if (ready.empty()) return false;
    deliver(ready[random_() % ready.size()]);
    return true;
  }
  // Until nothing happens any more.
  void settle() {
    for (int idle = 0; idle < 20;) {
      if (advance()) {
        idle = 0;
        continue;
      }
      ++idle;
      for (const auto& [id, process] : processes_) {
        if (!runs(id)) continue;
        process->membership.tick(random_());
        collect(id);
      }
    }
  }
  // All processes notice what they cannot reach.
  void notice_all() {
    for (const auto& [id, process] : processes_) {
      for (const auto& [peer, other] : processes_) {
        if (id == peer || connected(id, peer)) continue;
        const Ids& members = process->membership.members();
        const bool member = std::find(members.begin(), members.end(), peer) != members.end();
        if (member || peer == kLauncher) notice(id, peer);
      }
    }
  }

  std::size_t generations() const { return started_.size(); }

  // No two processes have started one generation with different members.
  void check_agreement() {
    for (const auto& [id, process] : processes_) {
      for (const auto& [generation, members] : process->started) {
        const auto [first, is_new] = started_.emplace(generation, members);
        INFO("generation " << generation << " of process " << id);
        CHECK(first->second == members);
      }
    }
    for (auto next = started_.begin(); next != started_.end(); ++next) {
      if (const auto before = std::prev(next); next != started_.begin())
        check_order(*before, *next);
    }
  }

 private:
  // Members keep their order, and newcomers follow them.
  static void check_order(const std::pair<const std::uint64_t, Ids>& before,
                          const std::pair<const std::uint64_t, Ids>& after) {
    if (after.first != before.first + 1) return;
    std::size_t last = 0;
    bool newcomers = false;
    for (const ProcessId id : after.second) {
      const auto found = std::find(before.second.begin(), before.second.end(), id);
      if (found == before.second.end()) {
        newcomers = true;
        continue;
      }
      const auto place = static_cast<std::size_t>(found - before.second.begin()) + 1;
      CHECK(!newcomers);
      CHECK(place > last);
      last = place;
    }
  }

  void add(ProcessId id, const Ids& members) {
    Membership::Options options;
    options.self = id;
    options.least = least_;
    options.most = most_;
    processes_[id] = std::make_unique<Process>(Membership(options, members));
  }

  void deliver(const std::pair<ProcessId, ProcessId>& link) {
    const auto [from, to] = link;
    auto& queue = queues_[link];
    const Bytes bytes = queue.front();
    queue.erase(queue.begin());
    if (!connected(from, to)) {
      queue.clear();
      notice(from, to);
      return;
    }
    membership(to).receive(from, decode_membership_message(bytes));
    collect(to);
  }

  void collect(ProcessId id) {
    Process& process = at(id);
    for (const Event& event : process.membership.take_events()) {
      switch (event.kind) {
        case Event::Kind::kEnded:
          process.ended = true;
          break;
        case Event::Kind::kStarted:
          CHECK((process.ended || process.started.empty()));
          process.ended = process.no_quorum = process.too_few = false;
          process.started[process.membership.generation()] = ids_of(event.members);
          for (const MemberRecord& member : event.members) {
            // What a process has promised is final.
            if (member.id == id && member.steps > 0) CHECK(member.steps == process.steps);
          }
          break;
        case Event::Kind::kExcluded:
          process.excluded = true;
          break;
        case Event::Kind::kNoQuorum:
          process.no_quorum = true;
          process.alive = false;  // it ends
          break;
        case Event::Kind::kTooFew:
          process.too_few = true;
          break;
      }
    }
    for (const Membership::Message& message : process.membership.take_outgoing()) {
      queues_[{id, message.to}].push_back(encode(message.message));
    }
  }

  std::mt19937_64 random_;
  std::size_t least_;
  std::size_t most_;
  ProcessId next_id_;
  std::map<ProcessId, std::unique_ptr<Process>> processes_;
  std::map<std::pair<ProcessId, ProcessId>, std::vector<Bytes>> queues_;
  std::set<std::pair<ProcessId, ProcessId>> cut_;
  std::map<std::uint64_t, Ids> started_;
};

}  // namespace

TEST_CASE("the survivors of one failure form the next generation in their order") {
  for (const ProcessId victim : {1, 2, 3}) {
    for (const ProcessId witness : {1, 2, 3}) {
      if (witness == victim) continue;
      CAPTURE(victim);
      CAPTURE(witness);
      Job job(victim * 10 + witness, 3);
      job.kill(victim);
      job.notice(witness, victim);
      job.settle();
      Ids expected{1, 2, 3};
      std::erase(expected, victim);
      for (const ProcessId id : expected) {
        CHECK(job.membership(id).generation() == 1);
        CHECK(job.membership(id).members() == expected);
      }
      CHECK(job.membership(kLauncher).members() == expected);
    }
  }
}

TEST_CASE("a single survivor goes on with the launcher and ends without it") {
  for (const bool launcher : {true, false}) {
    CAPTURE(launcher);
    Job job(7, 4);
    for (const ProcessId victim : {1, 2, 4}) job.kill(victim);
    if (!launcher) job.kill(kLauncher);
    job.notice(3, 1);
    job.settle();
    CHECK(job.membership(3).generation() == (launcher ? 1 : 0));
    CHECK(job.at(3).no_quorum == !launcher);
    if (launcher) CHECK(job.membership(3).members() == Ids{3});
  }
}

TEST_CASE("without the launcher, more than half of the members go on") {
  Job job(8, 5);
  job.kill(kLauncher);
  job.notice(4, kLauncher);
  job.settle();
  for (const ProcessId id : job.running()) {
    CHECK(job.membership(id).generation() == 1);
    CHECK(job.membership(id).members() == Ids{1, 2, 3, 4, 5});
  }
  job.kill(1);
  job.kill(3);
  job.notice(5, 3);
  job.settle();
  for (const ProcessId id : job.running()) CHECK(job.membership(id).members() == Ids{2, 4, 5});
  job.kill(2);
  job.kill(5);
  job.notice(4, 2);
  job.settle();
  CHECK(job.at(4).no_quorum);
  job.check_agreement();
}

TEST_CASE("of two members that do not reach each other, the one with the lower rank stays") {
  Job job(9, 4);
  job.cut(2, 4);
  job.notice(4, 2);
  job.settle();
  for (const ProcessId id : {1, 2, 3}) CHECK(job.membership(id).members() == Ids{1, 2, 3});
  CHECK(job.at(4).excluded);
}

TEST_CASE("newcomers join when the program admits them, or after a failure") {
  for (const bool failure : {false, true}) {
    CAPTURE(failure);
    Job job(10, 2);
    for (const ProcessId id : {1, 2}) {
      for (int step = 0; step < 3; ++step) job.step(id);
    }
    const ProcessId newcomer = job.arrive();
    job.settle();
    CHECK(job.membership(1).generation() == 0);
    CHECK(!job.at(1).ended);
    if (failure) {
      job.kill(1);
      job.notice(2, 1);
    } else {
      job.admit(1);
    }
    job.settle();
    const Ids expected = failure ? Ids{2, newcomer} : Ids{1, 2, newcomer};
    for (const ProcessId id : expected) CHECK(job.membership(id).members() == expected);
    CHECK(job.membership(kLauncher).members() == expected);
  }
}

TEST_CASE("fewer members than allowed wait for newcomers") {
  Job job(11, 3, 3);
  job.kill(2);
  job.notice(3, 2);
  job.settle();
  CHECK(job.at(1).too_few);
  CHECK(job.membership(1).generation() == 0);
  const ProcessId newcomer = job.arrive();
  job.settle();
  for (const ProcessId id : {ProcessId{1}, ProcessId{3}, newcomer}) {
    CHECK(job.membership(id).members() == Ids{1, 3, newcomer});
  }
}

TEST_CASE("newcomers beyond the largest number of members wait for a place") {
  Job job(13, 2, 1, 3);
  const ProcessId first = job.arrive();
  const ProcessId second = job.arrive();
  job.settle();
  job.admit(1);
  job.settle();
  CHECK(job.membership(1).members().size() == 3);
  CHECK(job.membership(first).members().size() + job.membership(second).members().size() == 3);
  job.kill(2);
  job.notice(1, 2);
  job.settle();
  for (const ProcessId id : {ProcessId{1}, first, second}) {
    CHECK(job.membership(id).members().size() == 3);
  }
}

TEST_CASE("two halves of a divided network do not both go on") {
  for (const bool launcher : {true, false}) {
    Job job(12, 4);
    if (!launcher) job.kill(kLauncher);
    for (const ProcessId one : {1, 2}) {
      for (const ProcessId other : {3, 4}) job.cut(one, other);
      job.cut(one, kLauncher);
    }
    job.notice_all();
    job.settle();
    for (const ProcessId id : {1, 2}) CHECK(job.at(id).no_quorum);
    for (const ProcessId id : {3, 4}) {
      CHECK(job.at(id).no_quorum == !launcher);
      if (launcher) CHECK(job.membership(id).members() == Ids{3, 4});
    }
    job.check_agreement();
  }
}

TEST_CASE("of two proposers one may die at any moment, and the other one goes on") {
  std::mt19937_64 random(testing::test_seed());
  for (int round = 0; round < 300; ++round) {
    const std::uint64_t seed = random();
    CAPTURE(seed);
    Job job(seed, 4);
    // Both 1 and 2 reach no lower rank.
    job.cut(1, 2);
    job.notice(2, 1);
    for (std::uint64_t steps = random() % 3; steps > 0; --steps) job.advance();
    job.notice(1, 2);
    for (std::uint64_t steps = random() % 12; steps > 0; --steps) job.advance();
    job.kill(2);
    job.notice(3, 2);
    for (int i = 0; i < 4; ++i) {
      job.settle();
      job.notice_all();
    }
    job.check_agreement();
    // What 2 has decided before it died may exclude 1.
    const bool excluded = job.at(1).excluded;
    const Ids expected = excluded ? Ids{3, 4} : Ids{1, 3, 4};
    for (const ProcessId id : expected) CHECK(job.membership(id).members() == expected);
  }
}

TEST_CASE("all processes agree on every generation, whatever fails and however late messages are") {
  constexpr int kRounds = 400;
  std::size_t generations = 0;
  std::mt19937_64 random(testing::test_seed());
  for (int round = 0; round < kRounds; ++round) {
    const std::uint64_t seed = random();
    CAPTURE(seed);
    std::mt19937_64 draw(seed);
    const std::size_t members = 1 + draw() % 6;
    Job job(draw(), members);
    const auto any = [&](const Ids& ids) { return ids[draw() % ids.size()]; };
    for (std::uint64_t act = draw() % 30; act > 0; --act) {
      const Ids running = job.running();
      if (running.empty()) break;
      const ProcessId one = any(running);
      const ProcessId other = draw() % 40 == 0 ? kLauncher : any(running);
      switch (draw() % 6) {
        case 0:
          job.kill(one);
          if (other != one) job.notice(other, one);
          break;
        case 1:
          if (other != one) job.notice(one, other);
          break;
        case 2:
          if (job.runs(kLauncher)) job.arrive();
          break;
        case 3:
          if (draw() % 20 == 0) job.kill(kLauncher);
          break;
        case 4:
          job.admit(one);
          break;
        default:
          job.step(one);
          break;
      }
      for (std::uint64_t steps = draw() % 60; steps > 0 && job.advance(); --steps) {
      }
    }
    // From now on nothing fails. Each generation may still name processes that are lost.
    for (int i = 0; i < 12; ++i) {
      job.settle();
      job.notice_all();
    }
    job.settle();
    job.check_agreement();
    generations += job.generations();
    // Those that could decide have done so, and reach one another.
    std::uint64_t newest = 0;
    for (const ProcessId id : job.running()) {
      newest = std::max(newest, job.membership(id).generation());
    }
    for (const ProcessId id : job.running()) {
      const Membership& membership = job.membership(id);
      if (membership.members().empty()) continue;
      CAPTURE(id);
      CHECK(membership.generation() == newest);
      CHECK(!job.at(id).ended);
      for (const ProcessId member : membership.members()) {
        if (member != id) CHECK(job.connected(id, member));
      }
    }
  }
  CHECK(generations > 2 * kRounds);  // the failures had consequences
}

TEST_CASE("malformed messages are refused") {
  std::mt19937_64 random(testing::test_seed());
  MembershipMessage promise;
  promise.kind = Kind::kPromise;
  promise.generation = 3;
  promise.ballot = {2, 17};
  promise.proposal = {{{4, 1}, {9, 2}}, false};
  promise.accepted = {1, 4};
  promise.steps = 300;
  promise.broken = {{4, 9}};
  promise.newcomers = {12, 13};
  const Bytes bytes = encode(promise);
  CHECK(decode_membership_message(bytes) == promise);
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    CHECK_THROWS_AS(decode_membership_message(std::span(bytes).first(length)), WireError);
  }
  for (int i = 0; i < 2000; ++i) {
    Bytes changed = bytes;
    changed[random() % changed.size()] = static_cast<std::byte>(random());
    try {
      const MembershipMessage message = decode_membership_message(changed);
      CHECK(decode_membership_message(encode(message)) == message);
    } catch (const WireError&) {
    }
  }
}
