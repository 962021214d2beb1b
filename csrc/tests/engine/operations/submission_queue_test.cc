// Tests of the submission queue alone: which operations it admits, under which names, and when it
// wakes the progress loop.
#include "engine/operations/submission_queue.h"

#include <doctest/doctest.h>

#include <map>
#include <thread>

#include "base/time.h"
#include "harness/engine_parts.h"

using namespace horoplug;
using namespace horoplug::testing;

namespace {

struct Queue {
  Queue() { submissions.open_set(0); }
  Status submit(const OperationPtr& operation) { return submissions.submit({&operation, 1}); }
  std::vector<OperationPtr> take() {
    auto requests = take_requests(submissions);
    return requests ? std::move(requests->operations) : std::vector<OperationPtr>{};
  }
  void finish(const OperationPtr& operation) {
    submissions.forget({&operation, 1});
    handles.finish_all({&operation, 1});
  }

  Doorbell doorbell;
  HandleTable handles;
  SubmissionQueue submissions{handles, doorbell};
};

}  // namespace

TEST_CASE("operations without a name are numbered by kind, and again from one on request") {
  Queue queue;
  const auto name_of = [&](OpKind kind) {
    const OperationPtr operation = make_test_operation("", 2, kind);
    CHECK(queue.submit(operation).ok());
    return operation->name();
  };
  CHECK(name_of(OpKind::kAllreduce) == "allreduce.noname.1");
  CHECK(name_of(OpKind::kAllreduce) == "allreduce.noname.2");
  CHECK(name_of(OpKind::kBroadcast) == "broadcast.noname.1");
  for (const OperationPtr& operation : queue.take()) queue.finish(operation);
  queue.submissions.begin_again(0, {});
  CHECK(name_of(OpKind::kAllreduce) == "allreduce.noname.1");
}

TEST_CASE("the gather of the parts of a sparse tensor is called an allreduce") {
  const OperationPtr operation = make_test_operation("allreduce.table", 2, OpKind::kAllgather);
  CHECK(operation->describe() == "allgather 'allreduce.table'");
  change_signature(*operation, [](Signature& s) { s.layout = "sparse float32 [3]"; });
  CHECK(operation->describe() == "'allreduce.table'");
}

TEST_CASE("a name in flight is rejected until its operation has ended") {
  Queue queue;
  const OperationPtr first = make_test_operation("x");
  CHECK(queue.submit(first).ok());
  const OperationPtr second = make_test_operation("x");
  const Status refused = queue.submit(second);
  CHECK(refused.code == HP_DUPLICATE_NAME);
  CHECK(mentions(refused, {"allreduce 'x'", "still in flight"}));
  CHECK(second->handle == 0);
  queue.submissions.open_set(3);
  CHECK(queue.submit(make_test_operation("x", 2, OpKind::kAllreduce, 3)).ok());
  queue.finish(first);
  CHECK(queue.submit(second).ok());
}

TEST_CASE("the time is counted during which operations are in flight") {
  Queue queue;
  CHECK(queue.submissions.active_time() == Seconds(0));
  const OperationPtr first = make_test_operation("a"), second = make_test_operation("b");
  const SteadyTime begin = steady_now();
  CHECK(queue.submit(first).ok());
  CHECK(queue.submit(second).ok());
  queue.finish(first);
  while (queue.submissions.active_time() < Seconds(0.01)) std::this_thread::yield();
  CHECK(queue.submit(make_test_operation("b")).code == HP_DUPLICATE_NAME);
  queue.finish(second);
  const Seconds active = queue.submissions.active_time();
  CHECK(active >= Seconds(0.01));
  CHECK(active <= steady_now() - begin);
  queue.submissions.forget({&second, 1});  // has ended already
  CHECK(queue.submissions.active_time() == active);
  CHECK(queue.submit(make_test_operation("c")).ok());
  while (queue.submissions.active_time() < active + Seconds(0.01)) std::this_thread::yield();
}

TEST_CASE("a list of submissions is admitted up to the first operation that is rejected") {
  Queue queue;
  const std::vector<OperationPtr> operations{make_test_operation("a"), make_test_operation("a"),
                                             make_test_operation("b")};
  CHECK(queue.submissions.submit(operations).code == HP_DUPLICATE_NAME);
  CHECK(operations[0]->handle != 0);
  CHECK(operations[2]->handle == 0);
  CHECK(queue.take().size() == 1);
}

TEST_CASE("sets that are unknown, closed or joined, and a queue that has ended, admit nothing") {
  Queue queue;
  auto refused = [&, last = 0](std::uint32_t set) mutable {
    const std::string name = "x" + std::to_string(++last);
    return queue.submit(make_test_operation(name, 2, OpKind::kAllreduce, set));
  };
  CHECK(mentions(refused(1), {"process set was removed"}));
  queue.submissions.open_set(1);
  CHECK(refused(1).ok());
  queue.submissions.close_set(1, {HP_SHUT_DOWN, "rank 1 has shut down"});
  CHECK(mentions(refused(1), {"rank 1 has shut down"}));
  CHECK(refused(0).ok());
  queue.submissions.forget_set(1);
  CHECK(refused(1).code == HP_INVALID_ARGUMENT);

  const OperationPtr join = make_test_operation("join", 2, OpKind::kJoin);
  CHECK(queue.submit(join).ok());
  CHECK(mentions(refused(0), {"this rank has joined"}));
  queue.finish(join);
  CHECK(refused(0).ok());

  queue.submissions.close_set(0, {HP_SHUT_DOWN, "rank 1 has shut down"});
  CHECK(mentions(refused(0), {"rank 1 has shut down"}));
}

TEST_CASE("a failure replaces a shutdown of this rank as the reason, but no other end") {
  Queue queue;
  queue.submissions.request_leave({HP_SHUT_DOWN, "this rank has shut down"});
  CHECK(queue.submissions.end().code == HP_SHUT_DOWN);
  queue.submissions.fail({HP_SHUT_DOWN, "rank 1 has shut down"});
  CHECK(mentions(queue.submissions.end(), {"this rank has shut down"}));
  queue.submissions.fail({HP_ABORTED, "rank 1 has died"});
  CHECK(queue.submissions.end().message == "rank 1 has died");

  Queue other;
  other.submissions.fail({HP_ABORTED, "first"});
  other.submissions.fail({HP_TIMEOUT, "second"});
  CHECK(other.submissions.end().message == "first");
}

TEST_CASE("submissions wake the loop once enough have arrived or a caller announces a wait") {
  Queue queue;
  CHECK(queue.submit(make_test_operation("one")).ok());
  CHECK(queue.submissions.requests_waiting());
  CHECK(queue.take().size() == 1);
  CHECK(!queue.submissions.requests_waiting());

  CHECK(!queue.submissions.set_wanted(3));
  CHECK(queue.submit(make_test_operation("a")).ok());
  CHECK(queue.submit(make_test_operation("b")).ok());
  CHECK(!queue.submissions.requests_waiting());
  CHECK(queue.submit(make_test_operation("c")).ok());
  CHECK(queue.submissions.requests_waiting());
  CHECK(queue.take().size() == 3);

  CHECK(queue.submit(make_test_operation("d")).ok());
  CHECK(!queue.submissions.requests_waiting());
  queue.submissions.announce();
  CHECK(queue.submissions.requests_waiting());
  CHECK(queue.take().size() == 1);
  queue.submissions.announce();  // nothing has been submitted
  CHECK(!queue.submissions.requests_waiting());

  CHECK(queue.submit(make_test_operation("e")).ok());
  CHECK(queue.submissions.set_wanted(1));  // one submission is waiting already
  CHECK(queue.submissions.requests_waiting());
}

TEST_CASE("during the handshake, only requests to abort or to leave are taken") {
  Queue queue;
  CHECK(queue.submit(make_test_operation("early")).ok());
  CHECK(!take_requests(queue.submissions, true));
  queue.submissions.wake();
  CHECK(queue.take().size() == 1);
  queue.submissions.request_abort("enough");
  const auto requests = take_requests(queue.submissions, true);
  REQUIRE(requests);
  CHECK(requests->abort_reason == "enough");
  CHECK(!requests->leave);
  queue.submissions.request_leave({HP_SHUT_DOWN, "this rank has shut down"});
  CHECK(take_requests(queue.submissions, true)->leave);
}

TEST_CASE("a new dependency stage begins with the first submission after an observed result") {
  Queue queue;
  const auto submit = [&](const std::string& name) {
    const OperationPtr operation = make_test_operation(name);
    CHECK(queue.submit(operation).ok());
    return operation;
  };
  const OperationPtr first = submit("first");
  CHECK(submit("second")->dependency_stage == first->dependency_stage);
  queue.finish(first);
  CHECK(submit("third")->dependency_stage == first->dependency_stage);
  CHECK(queue.handles.poll(first->handle).ok());
  const OperationPtr after = submit("fourth");
  CHECK(after->dependency_stage > first->dependency_stage);
  CHECK(submit("fifth")->dependency_stage == after->dependency_stage);
}

TEST_CASE("operations of several threads arrive once each, in the order of their thread") {
  Queue queue;
  constexpr int kThreads = 4;
  const int count = kSlowedDown ? 300 : 2000;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      for (int i = 0; i < count; ++i) {
        const std::string name = std::to_string(thread) + "." + std::to_string(i);
        if (!queue.submit(make_test_operation(name)).ok()) return;
      }
    });
  }
  std::map<std::string, int> next;
  const SteadyTime end = steady_now() + Seconds(60);
  for (int taken = 0; taken < kThreads * count && steady_now() < end;) {
    for (const OperationPtr& operation : queue.take()) {
      const std::string thread = operation->name().substr(0, operation->name().find('.'));
      CHECK(operation->name() == thread + "." + std::to_string(next[thread]++));
      queue.finish(operation);
      ++taken;
    }
  }
  for (auto& thread : threads) thread.join();
  for (const auto& [thread, number] : next) CHECK(number == count);
  CHECK(next.size() == kThreads);
}
