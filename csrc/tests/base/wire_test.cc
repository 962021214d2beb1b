// Control messages round-trip through their encoding, and invalid bytes are rejected.
#include <doctest/doctest.h>

#include <random>

#include "harness/any_message.h"
#include "harness/cluster.h"
#include "harness/slowed_down.h"

using namespace horoplug;
using horoplug::testing::decode_any;
using horoplug::testing::kSlowedDown;

namespace {

Signature some_signature() {
  Signature signature;
  signature.op = OpKind::kReducescatter;
  signature.dtype = DType::kBFloat16;
  signature.reduce = ReduceOp::kMax;
  signature.root = -3;
  signature.prescale = 0.25;
  signature.layout = "sparse float32 [3, 4]";
  signature.shapes = {{3, 0, std::int64_t{1} << 40}, {}, {7}};
  return signature;
}

Ready some_ready() {
  Ready ready;
  ready.agreement = 5;
  ready.ids = {9, 10, 300};
  ready.requests = {{"one", {{some_signature(), {}}}},
                    {"two", {{some_signature(), {1, 2}}, {Signature{}, {4}}}}};
  return ready;
}

Decisions some_plan() {
  DecisionItem query;
  query.kind = DecisionItem::Kind::kDependencyQuery;
  query.batch = 4;
  query.operations = 5;
  DecisionItem lock;
  lock.kind = DecisionItem::Kind::kInstallPlan;
  lock.place = 3;
  lock.skipped = 2;
  const PlanContents contents{{0, 3, 200}, {1}, {2, 4}};
  lock.choices = {{{}, contents}, {{.chunk_bytes = 64 << 10}, contents}, {{.lanes = 2}, {{0}}}};
  lock.rounds = 13;
  DecisionItem unlock;
  unlock.kind = DecisionItem::Kind::kUninstallPlan;
  unlock.batch = 70;
  DecisionItem remember;
  remember.kind = DecisionItem::Kind::kRememberPlan;
  remember.batch = 4;
  remember.place = 1;
  DecisionItem again = lock;
  again.choices.clear();
  return {2, {query, lock, unlock, remember, again}};
}

std::vector<Bytes> valid_messages() {
  DecisionItem batch;
  batch.batch = 12;
  batch.members = {
      {3, "", {}, {}}, {4, "new", {1, 2}, some_signature()}, {std::nullopt, "x", {}, {}}};
  DecisionItem joined;
  joined.kind = DecisionItem::Kind::kJoined;
  joined.batch = 13;
  joined.rank = 3;
  DecisionItem error;
  error.kind = DecisionItem::Kind::kError;
  error.name = "x";
  error.text = "mismatch";
  DecisionItem close;
  close.kind = DecisionItem::Kind::kClose;
  close.rank = 2;
  Report report;
  report.question = 3;
  report.ranks = 4;
  report.pending = {{.key = {0, "a"},
                     .age = Seconds(1.5),
                     .submitted = RankRanges(std::vector<int>{1, 2, 5}),
                     .waiting = RankRanges(std::vector<int>{1})},
                    {.key = {2, "b"},
                     .age = Seconds(1.5),
                     .join = true,
                     .peer = 3,
                     .submitted = {},
                     .waiting = {}},
                    {.key = {2, "b", "g"}, .submitted = {1}, .waiting = {}, .members = {0, 1}}};
  report.quiet = RankRanges(std::vector<int>{1, 2});
  report.waiting_for_unnamed = RankRanges(std::vector<int>{5});
  report.joined[2] = RankRanges(std::vector<int>{1});
  report.busy_threads[3] = RankRanges(std::vector<int>{2});
  Hello hello;
  hello.rank = 1;
  hello.size = 4;
  hello.settings = {{"a", "b"}};
  return {encode(hello),
          encode(7, some_ready()),
          encode(7, Decisions{2, {batch, joined, error, close}}),
          encode(0, Leave{3}),
          encode(4, Leave{kSetRemoved}),
          encode(4, Joined{2, 3}),
          encode(MessageKind::kFail, 4, Abort{HP_DEADLOCK, "why"}),
          encode(7, Offer{300, 5, DType::kFloat32, {2, 1000}}),
          encode(7, Offer{300, 5, DType::kFloat32, {1}, Offer::Source::kInline, Bytes(4)}),
          encode(Accept{300, {0, 7}}),
          encode(MessageKind::kReject, 7, Refusal{300, HP_MISMATCH, "why"}),
          encode(MessageKind::kCancel, 7, Refusal{300, HP_DEADLOCK, "why"}),
          encode(InspectionRequest{Seconds(2.5), true}),
          encode(CallOff{{1, "a", "g"}, {HP_DEADLOCK, "why"}}),
          encode(InspectionQuestion{9, Seconds(2.5), true, {{0, "a"}, {2, "b"}}}),
          encode(report),
          encode(Abort{HP_TIMEOUT, "why"}),
          encode(MessageKind::kBye),
          encode(3, some_plan()),
          encode(3, DependencyLabels{4, {0, 1, 0, 300}}),
          encode(MessageKind::kBreak, 3, PlanNotice{2, 0}),
          encode(MessageKind::kHalted, 3, PlanNotice{2, 70})};
}

}  // namespace

TEST_CASE("readiness messages round-trip") {
  const Bytes bytes = encode(7, some_ready());
  Reader reader(bytes);
  const MessageHead head = read_head(reader);
  CHECK(head.kind == MessageKind::kReady);
  CHECK(head.set == 7);
  const Ready got = decode<Ready>(reader);
  const Ready sent = some_ready();
  CHECK(got.agreement == sent.agreement);
  CHECK(got.ids == sent.ids);
  REQUIRE(got.requests.size() == 2);
  CHECK(got.requests[1].name == "two");
  REQUIRE(got.requests[1].variants.size() == 2);
  CHECK(got.requests[1].variants[0].signature == some_signature());
  CHECK(got.requests[1].variants[0].ranks == RankRanges{1, 2});
}

TEST_CASE("decisions round-trip") {
  DecisionItem batch;
  batch.batch = 12;
  batch.members = {
      {3, "", {}, {}}, {4, "new", {1, 2}, some_signature()}, {std::nullopt, "unnumbered", {}, {}}};
  const Bytes bytes = encode(1, Decisions{2, {batch}});
  Reader reader(bytes);
  read_head(reader);
  const Decisions got = decode<Decisions>(reader);
  REQUIRE(got.items.size() == 1);
  CHECK(got.items[0].batch == 12);
  REQUIRE(got.items[0].members.size() == 3);
  CHECK(got.items[0].members[0].id == 3);
  CHECK(got.items[0].members[1].name == "new");
  CHECK(got.items[0].members[1].absent == RankRanges{1, 2});
  CHECK(got.items[0].members[1].signature == some_signature());
  CHECK(!got.items[0].members[2].id);
}

TEST_CASE("ranks that have joined take little space in a message, however many operations it has") {
  constexpr std::size_t kOperations = 200;
  RankRanges most(std::vector<RankRanges::Range>{{1, 9'999}});
  RankRanges every_other;
  std::vector<RankRanges::Range> ranges;
  for (int rank = 1; rank < 2'000; rank += 2) ranges.push_back({rank, rank});
  every_other = RankRanges(std::move(ranges));
  const auto size = [&](const RankRanges& joined) {
    DecisionItem batch;
    Ready ready;
    for (std::size_t i = 0; i < kOperations; ++i) {
      batch.members.push_back({static_cast<std::uint32_t>(i), "", joined, some_signature()});
      ready.requests.push_back({"operation " + std::to_string(i), {{some_signature(), joined}}});
    }
    const Bytes decisions = encode(1, Decisions{2, {batch}});
    const Bytes up = encode(1, ready);
    Reader reader(decisions), up_reader(up);
    read_head(reader);
    read_head(up_reader);
    const Decisions got = decode<Decisions>(reader);
    const Ready got_up = decode<Ready>(up_reader);
    for (std::size_t i = 0; i < kOperations; ++i) {
      CHECK(got.items[0].members[i].absent == joined);
      CHECK(got_up.requests[i].variants[0].ranks == joined);
    }
    return decisions.size() + up.size();
  };
  const std::size_t least = size({1});
  CHECK(size(most) < least + 100);
  // A ninth of the operations names all ranges, so that a short message cannot fill the memory.
  CHECK(size(every_other) < least + 2 * kOperations * 2 * 1000 / 8);
}

TEST_CASE("plans round-trip") {
  const Bytes bytes = encode(3, some_plan());
  Reader reader(bytes);
  read_head(reader);
  const Decisions got = decode<Decisions>(reader);
  REQUIRE(got.items.size() == 5);
  CHECK(got.items[0].kind == DecisionItem::Kind::kDependencyQuery);
  CHECK(got.items[0].batch == 4);
  CHECK(got.items[0].operations == 5);
  CHECK(got.items[1].kind == DecisionItem::Kind::kInstallPlan);
  CHECK(got.items[1].choices == some_plan().items[1].choices);
  CHECK(got.items[1].rounds == 13);
  CHECK(got.items[1].place == 3);
  CHECK(got.items[1].skipped == 2);
  CHECK(got.items[2].kind == DecisionItem::Kind::kUninstallPlan);
  CHECK(got.items[2].batch == 70);
  CHECK(got.items[3].kind == DecisionItem::Kind::kRememberPlan);
  CHECK(got.items[3].batch == 4);
  CHECK(got.items[3].place == 1);
  CHECK(got.items[4].choices.empty());
}

TEST_CASE("names with common prefixes and suffixes round-trip and are compact") {
  Ready ready;
  for (const char* name : {"a", "a", "aa", "aba", "abba", "ab", "b", "layer.1.weight",
                           "layer.12.weight", "layer.2.weight", "layer.2.bias", "x", "layer.2."}) {
    ready.requests.push_back({name, {{some_signature(), {}}}});
  }
  const auto decoded = [](const Bytes& bytes) {
    Reader reader(bytes);
    read_head(reader);
    return decode<Ready>(reader);
  };
  const Ready got = decoded(encode(0, ready));
  REQUIRE(got.requests.size() == ready.requests.size());
  for (std::size_t i = 0; i < got.requests.size(); ++i) {
    CHECK(got.requests[i].name == ready.requests[i].name);
    CHECK(got.requests[i].variants[0].signature == some_signature());
  }
}

TEST_CASE("a message of repeated names and signatures expands by a bounded factor") {
  Signature many_shapes = some_signature();
  many_shapes.shapes.assign(20'000, {});
  Signature two_shapes = some_signature();
  two_shapes.shapes.assign(2, {5});
  const std::size_t requests = kSlowedDown ? 30 : 300;
  for (const Signature& signature : {many_shapes, two_shapes}) {
    for (const std::size_t length : {5, 60'000}) {
      Ready ready;
      ready.requests.assign(requests, {std::string(length, 'x'), {{signature, {}}}});
      const Bytes message = encode(0, ready);
      CAPTURE(length);
      CAPTURE(signature.shapes.size());
      CHECK(message.size() > requests * (length + signature.shapes.size()) / 20);
      Reader reader(message);
      read_head(reader);
      const Ready got = decode<Ready>(reader);
      REQUIRE(got.requests.size() == ready.requests.size());
      for (const auto& request : got.requests) {
        CHECK(request.name == ready.requests[0].name);
        CHECK(request.variants[0].signature == signature);
      }
    }
  }
}

TEST_CASE("a failure needs an error code") {
  for (int code = 0; code <= HP_INTERNAL; ++code) {
    const auto status = static_cast<hp_status>(code);
    const bool is_error = status != HP_OK && status != HP_IN_PROGRESS;
    DecisionItem error;
    error.kind = DecisionItem::Kind::kError;
    error.name = "x";
    error.code = status;
    DecisionItem fail_all;
    fail_all.kind = DecisionItem::Kind::kFailAll;
    fail_all.code = status;
    for (const Bytes& message :
         {encode(Abort{status, "text"}), encode(MessageKind::kFail, 0, Abort{status, "text"}),
          encode(0, Decisions{1, {error}}), encode(0, Decisions{1, {fail_all}}),
          encode(MessageKind::kCancel, 0, Refusal{1, status, "text"}),
          encode(CallOff{{}, {status, "text"}})}) {
      CAPTURE(code);
      if (is_error) {
        CHECK_NOTHROW(decode_any(message));
      } else {
        CHECK_THROWS_AS(decode_any(message), WireError);
      }
    }
  }
}

TEST_CASE("a decoded message is encoded as the same bytes") {
  for (const Bytes& message : valid_messages()) CHECK(decode_any(message) == message);
}

TEST_CASE("a truncated message is rejected") {
  for (const Bytes& message : valid_messages()) {
    CHECK_NOTHROW(decode_any(message));
    for (std::size_t length = 0; length < message.size(); ++length) {
      CHECK_THROWS_AS(decode_any(std::span(message).first(length)), WireError);
    }
    Bytes longer = message;
    longer.push_back(std::byte{0});
    CHECK_THROWS_AS(decode_any(longer), WireError);
  }
}

TEST_CASE("corrupted messages are rejected or decoded as valid ones, and never crash") {
  std::mt19937_64 random(horoplug::testing::test_seed());
  for (const Bytes& message : valid_messages()) {
    for (int i = 0; i < (kSlowedDown ? 2'000 : 20'000); ++i) {
      Bytes damaged = message;
      for (int hits = 1 + static_cast<int>(random() % 4); hits > 0; --hits) {
        damaged[random() % damaged.size()] = static_cast<std::byte>(random());
      }
      try {
        decode_any(damaged);
      } catch (const WireError&) {
      }
    }
  }
}
