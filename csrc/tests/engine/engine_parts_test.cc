// The handshake, the registry of process sets, shared buffers and completion, without an engine.
#include "harness/engine_parts.h"

#include <doctest/doctest.h>

#include "engine/handshake.h"
#include "engine/message_dispatcher.h"
#include "engine/peers.h"
#include "engine/shared_buffers.h"

using namespace horoplug;
using namespace horoplug::testing;

namespace {

// A handshake that receives the messages of its rank's mesh.
struct Starting {
  explicit Starting(EngineParts& given, double now = 0)
      : parts(given),
        handshake(
            parts.config, parts.mesh, *parts.doorbell,
            [this](const std::vector<Segment>&) { ++done; }, at(now)) {
    handshake.begin();
  }
  void receive_all() {
    for (auto& [from, message] : std::exchange(parts.received, {})) {
      Reader reader(message);
      if (read_head(reader).kind == MessageKind::kHello) {
        handshake.receive(from, decode<Hello>(reader));
      } else {
        handshake.receive_introduced(from);
      }
    }
  }
  EngineParts& parts;
  int done = 0;
  Handshake handshake;
};

void feed(EngineParts& rank, const OperationPtr& operation) {
  CHECK(rank.submissions.submit({&operation, 1}).ok());
}

}  // namespace

TEST_CASE("the handshake is done when every peer has introduced itself") {
  const auto ranks = make_parts(3);
  Starting first(*ranks[0]);
  Starting second(*ranks[1]);
  pump(ranks);
  first.receive_all();
  CHECK(first.done == 0);
  const Status late = failure_of([&] { first.handshake.check_deadline(at(1000)); });
  CHECK(late.code == HP_TIMEOUT);
  CHECK(mentions(late, {"no answer from rank 2"}));
  Starting third(*ranks[2]);
  pump(ranks);
  first.receive_all();
  second.receive_all();
  third.receive_all();
  CHECK(first.done == 1);
  CHECK(second.done == 1);
  CHECK(third.done == 1);
}

TEST_CASE("with connections on demand, the handshake is done when the tree of all ranks says so") {
  const auto ranks = make_parts(3, {}, {{1, 2}});
  Starting root(*ranks[0]);
  Starting first(*ranks[1]);
  const auto exchange = [&] {
    pump(ranks);
    root.receive_all();
    first.receive_all();
  };
  exchange();
  exchange();
  // Rank 1 has heard from all ranks that it is connected with.
  CHECK(first.done == 0);
  CHECK(mentions(failure_of([&] { first.handshake.check_deadline(at(1000)); }),
                 {"no answer from rank 0"}));
  CHECK(mentions(failure_of([&] { root.handshake.check_deadline(at(1000)); }),
                 {"no answer from rank 2"}));
  CHECK_THROWS_AS(root.handshake.receive_introduced(1), WireError);  // it has done so
  Starting last(*ranks[2]);
  for (int i = 0; i < 3; ++i) {
    exchange();
    last.receive_all();
  }
  for (const Starting* each : {&root, &first, &last}) CHECK(each->done == 1);
  CHECK(ranks[1]->mesh.take_needed().empty());
}

TEST_CASE("the handshake rejects different settings, a second introduction, and a wrong rank") {
  const auto ranks = make_parts(2);
  ranks[1]->config.options.fusion_threshold = 17;
  Starting first(*ranks[0]);
  Starting second(*ranks[1]);
  pump(ranks);
  const Status mismatch = failure_of([&] { first.receive_all(); });
  CHECK(mismatch.code == HP_MISMATCH);
  CHECK(mentions(mismatch, {"fusion threshold", "17", "rank 1"}));
  Hello hello;
  hello.rank = 0;
  CHECK_THROWS_AS(first.handshake.receive(1, hello), WireError);
  hello.rank = 1;
  first.handshake.receive(1, hello);
  CHECK_THROWS_AS(first.handshake.receive(1, hello), WireError);
}

TEST_CASE("process sets have the same numbers on all ranks, in and out of the set") {
  const auto ranks = make_parts(3);
  for (const auto& rank : ranks) {
    rank->registry.create_global({});
    CHECK(rank->registry.create({0, 2}, at(0)) == 1);
    CHECK(rank->registry.create({1}, at(0)) == 2);
    CHECK(rank->registry.last_number() == 2);
    CHECK(rank->registry.members(1)->ranks == std::vector{0, 2});
    const int number = rank->config.rank;
    CHECK((rank->registry.find(1) != nullptr) == (number != 1));
    CHECK((rank->registry.find(2) != nullptr) == (number == 1));
    CHECK(rank->registry.members(3) == nullptr);
    CHECK(rank->registry.ranks_by_set().size() == 3);
  }
}

TEST_CASE("ranks of a process set must exist and ascend") {
  for (const std::vector<int>& ranks :
       std::vector<std::vector<int>>{{}, {-1}, {3}, {1, 1}, {2, 0}}) {
    const Status status = failure_of([&] { ProcessSetRegistry::check_ranks(ranks, 3); });
    CHECK(status.code == HP_INVALID_ARGUMENT);
  }
  ProcessSetRegistry::check_ranks({0, 2}, 3);
}

TEST_CASE("a removal ends when its set is closed, and submitters see it at once") {
  const auto ranks = make_parts(2);
  EngineParts& rank = *ranks[0];
  rank.registry.create_global({});
  rank.registry.create({0}, at(0));
  rank.registry.create({1}, at(0));
  const auto remove = [&](std::uint32_t set) {
    OperationPtr removal = make_test_operation("", 2, OpKind::kRemoveSet);
    feed(rank, removal);
    rank.registry.begin_removal(set, removal, at(0));
    return removal;
  };
  CHECK(remove(2)->done);  // this rank is not a member
  const OperationPtr removal = remove(1);
  CHECK(!removal->done);
  CHECK(rank.registry.members(1) == nullptr);
  const OperationPtr late = make_test_operation("late", 1, OpKind::kAllreduce, 1);
  CHECK(mentions(rank.submissions.submit({&late, 1}), {"was removed"}));
  CHECK(mentions(remove(1)->status, {"is being removed already"}));
  CHECK(!rank.registry.finish_removals(rank.clock));
  CHECK(negotiated(*rank.registry.find(1)).decisions.size() == 1);
  CHECK(rank.registry.finish_removals(rank.clock));
  CHECK(removal->done);
  CHECK(removal->status.ok());
  CHECK(rank.registry.find(1) == nullptr);
}

TEST_CASE("messages for a set that does not exist yet are delivered after its creation") {
  const auto ranks = make_parts(2);
  EngineParts& rank = *ranks[0];
  rank.registry.create_global({});
  Handshake handshake(rank.config, rank.mesh, *rank.doorbell, [](const auto&) {}, at(0));
  StallInspector stalls(rank.config, rank.mesh, rank.registry, rank.point_to_point, rank.handles,
                        rank.suspicion, rank.peers, rank.activity, rank.clock);
  MessageDispatcher dispatcher(rank.lifecycle, rank.mesh, handshake, rank.registry,
                               rank.point_to_point, stalls, rank.suspicion, rank.peers,
                               rank.tracing);
  dispatcher.receive(1, encode(0, Leave{1}));  // kept until the handshake is done
  rank.lifecycle.enter(Lifecycle::State::kRunning);
  const auto decisions = [&](std::uint32_t set) {
    ProcessSet& found = *rank.registry.find(set);
    CHECK(found.leave());
    return negotiated(found).decisions.size();
  };
  dispatcher.deliver_early();
  CHECK(decisions(0) == 1);  // all ranks leave: the set closes
  dispatcher.receive(1, encode(1, Leave{1}));
  rank.registry.create({0, 1}, at(0));
  dispatcher.deliver_early(1);
  CHECK(decisions(1) == 1);
  // Messages from ranks that are not members of the set are rejected.
  rank.registry.create({0}, at(0));
  CHECK_THROWS_AS(dispatcher.receive(1, encode(2, Leave{1})), WireError);
  CHECK(!rank.peers.has_departed(1));
  dispatcher.receive(1, encode(MessageKind::kBye));
  CHECK(rank.peers.has_departed(1));
}

TEST_CASE("a shared buffer is found by operations that work in it, and only by them") {
  const auto ranks = make_parts(2);
  SharedBuffers buffers(ranks[0]->config, ranks[0]->segments);
  CHECK(failure_of([&] { SharedBuffers::check_size(0); }).code == HP_INVALID_ARGUMENT);
  const OperationPtr creation = make_test_operation("", 2, OpKind::kAddBuffer);
  change_signature(*creation, [](Signature& signature) { signature.shapes = {{4096}}; });
  buffers.create(*creation);
  CHECK(creation->value == 1);
  std::byte* const data = creation->buffer->data();
  const auto found = [&](const std::byte* input, std::byte* output, std::int64_t count) {
    const OperationPtr operation = make_test_operation("x");
    change_signature(*operation, [&](Signature& signature) {
      signature.dtype = DType::kFloat32;
      signature.shapes = {{count}};
    });
    operation->tensors = {{input, output}};
    return buffers.find(*operation) == creation->buffer;
  };
  CHECK(found(data, data, 1024));
  CHECK(found(data + 64, data + 64, 16));
  CHECK(!found(data, data + 64, 16));
  CHECK(!found(data, data, 1025));
  CHECK(!found(data - 4, data - 4, 16));
}

TEST_CASE("completion names the operation in a failure and frees its name") {
  const auto ranks = make_parts(2);
  EngineParts& rank = *ranks[0];
  rank.registry.create_global({});
  const OperationPtr a = make_test_operation("a");
  const OperationPtr b = make_test_operation("b");
  feed(rank, a);
  feed(rank, b);
  rank.completion.end(OperationList{a, b}, {HP_ABORTED, "allreduce 'a' has made no progress"});
  CHECK(a->status.message == "allreduce 'a' has made no progress");
  CHECK(mentions(b->status, {"allreduce 'b' failed: ", "no progress"}));
  CHECK(rank.handles.poll(b->handle).code == HP_ABORTED);
  feed(rank, make_test_operation("a"));
}
