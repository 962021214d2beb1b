// Tests of what the scheduler does when everything that is pending on a process set fails.
#include "engine/scheduler.h"

#include <doctest/doctest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "controller/messages/messages.h"
#include "harness/engine_parts.h"

using namespace horoplug;
using namespace horoplug::testing;

namespace {

// A rank whose peers exist only as messages.
struct Rank {
  explicit Rank(EngineParts& given) : parts(given) { parts.registry.create_global({}); }

  OperationPtr submit(const std::string& name) {
    const OperationPtr operation = make_test_operation(name, 2);
    REQUIRE(parts.submissions.submit({&operation, 1}).ok());
    return operation;
  }
  // What the loop does with the submissions.
  void take() {
    scheduler.apply_failures();
    if (auto requests = take_requests(parts.submissions)) {
      for (const OperationPtr& operation : requests->operations) scheduler.accept(operation);
    }
  }
  // The root of the set has found a deadlock.
  void receive_failure() {
    DecisionItem item;
    item.kind = DecisionItem::Kind::kFailAll;
    item.code = HP_DEADLOCK;
    item.text = "deadlock";
    const Bytes message = encode(0, Decisions{agreement++, {item}});
    Reader reader(message);
    const MessageHead head = read_head(reader);
    parts.registry.global().receive(0, head.kind, reader);
  }
  bool is_pending(const OperationPtr& operation) {
    return parts.handles.poll(operation->handle).code == HP_IN_PROGRESS;
  }

  EngineParts& parts;
  std::uint32_t agreement = 0;
  SharedBuffers buffers{parts.config, parts.segments};
  TuningLog tuning_log{"", parts.config.log};
  Counters counters;
  Scheduler scheduler{{.mesh = parts.mesh,
                       .registry = parts.registry,
                       .point_to_point = parts.point_to_point,
                       .submissions = parts.submissions,
                       .completion = parts.completion,
                       .buffers = buffers,
                       .gpu = parts.gpu,
                       .peers = parts.peers,
                       .tracing = parts.tracing,
                       .tuning_log = tuning_log,
                       .counters = counters,
                       .activity = parts.activity,
                       .clock = parts.clock,
                       .transfers_outlive_ranks = false},
                      [](std::uint32_t) {}};
};

}  // namespace

TEST_CASE("an operation that was submitted after a search does not fail with its deadlock") {
  const auto ranks = make_parts(2);
  Rank rank(*ranks[1]);
  const OperationPtr waiting = rank.submit("");
  const OperationPtr named = rank.submit("named");
  rank.take();
  waiting->reported = named->reported = true;
  // The rank has learned of the deadlock in another set, and goes on.
  const OperationPtr later = rank.submit("");
  const OperationPtr last = rank.submit("last");
  rank.take();
  CHECK(later->name() == "allreduce.noname.2");
  rank.receive_failure();
  rank.scheduler.negotiate();
  CHECK(rank.parts.handles.poll(waiting->handle).code == HP_DEADLOCK);
  CHECK(rank.parts.handles.poll(named->handle).code == HP_DEADLOCK);
  // Other ranks submit it after the failure, and count from one.
  CHECK(later->name() == "allreduce.noname.1");
  CHECK(rank.is_pending(later));
  CHECK(rank.is_pending(last));
  rank.take();
  CHECK(rank.parts.registry.global().pending().contains("allreduce.noname.1"));
  CHECK(rank.parts.registry.global().pending().contains("last"));
  const OperationPtr next = rank.submit("");
  CHECK(next->name() == "allreduce.noname.2");
}

TEST_CASE("an operation that the loop takes together with a failure of the set goes on") {
  const auto ranks = make_parts(2);
  Rank rank(*ranks[1]);
  const OperationPtr waiting = rank.submit("");
  rank.take();
  waiting->reported = true;
  rank.receive_failure();
  const OperationPtr later = rank.submit("");
  rank.take();
  rank.scheduler.negotiate();
  CHECK(rank.parts.handles.poll(waiting->handle).code == HP_DEADLOCK);
  CHECK(rank.is_pending(later));
  // Other ranks count from one after the failure.
  CHECK(later->name() == "allreduce.noname.1");
  CHECK(rank.parts.registry.global().pending().contains(later->name()));
  // A second failure of the same kind, which has been under way meanwhile.
  rank.receive_failure();
  rank.scheduler.negotiate();
  CHECK(rank.is_pending(later));
}
