// Jobs in which most ranks are connected when they first send each other something.
#include <doctest/doctest.h>

#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "harness/cluster.h"
#include "harness/switchboard.h"

using namespace horoplug;
using namespace horoplug::testing;

namespace {

// A job of ranks of which few are connected at the start.
struct Job {
  explicit Job(int ranks, Transport transport = Transport::kTcp, int lanes = 1,
               const EngineOptions& options = test_options()) {
    std::vector<EngineConfig> configs = make_configs(transport, ranks, options, lanes);
    auto taken = std::make_unique<Switchboard>(configs, neighbours(ranks));
    cluster.emplace(std::move(configs));
    board = std::move(taken);
    board->serve(*cluster);
  }
  std::optional<Cluster> cluster;
  std::unique_ptr<Switchboard> board;  // ends before the engines
};

void check(bool right, const std::string& what) {
  if (!right) throw std::runtime_error("wrong result of " + what);
}

// Every rank sends rank j a row with the value 100 * rank + j.
void alltoall(Engine& engine, int rank, int ranks) {
  std::vector<float> rows(static_cast<std::size_t>(ranks));
  for (int to = 0; to < ranks; ++to) rows[static_cast<std::size_t>(to)] = 100.F * rank + to;
  const auto bytes = perform(engine, {.op = OpKind::kAlltoall,
                                      .name = "alltoall",
                                      .shape = {ranks},
                                      .input = rows.data(),
                                      .splits = std::vector<std::int64_t>(rows.size(), 1)});
  const auto* const received = reinterpret_cast<const float*>(bytes.data());
  check(bytes.size() == rows.size() * sizeof(float), "alltoall");
  for (int from = 0; from < ranks; ++from) check(received[from] == 100.F * from + rank, "alltoall");
}

void allreduce(Engine& engine, int ranks, std::int64_t count, const std::string& name) {
  std::vector<float> data(static_cast<std::size_t>(count), 1);
  perform(engine, {.name = name, .shape = {count}, .input = data.data(), .output = data.data()});
  for (const float value : data) check(value == static_cast<float>(ranks), name);
}

}  // namespace

TEST_CASE("a job that reduces over a ring or by doubling needs no further connection") {
  for (const auto& [algorithm, ranks] : {std::pair("ring", 12), std::pair("doubling", 16)}) {
    EngineOptions options = test_options();
    options.algorithm = algorithm;
    Job job(ranks, Transport::kTcp, 1, options);
    CHECK(job.board->pairs() > static_cast<std::size_t>(ranks));
    job.cluster->run([&](int rank) {
      for (int step = 0; step < 20; ++step) {
        allreduce(job.cluster->engine(rank), ranks, 100'000, "large");
      }
    });
    CHECK(job.board->made() == 0);
  }
}

TEST_CASE("alltoall between ranks that were not connected is right over every transport") {
  for (const int lanes : {1, 3}) {
    for (const Transport transport :
         {Transport::kTcp, Transport::kInproc, Transport::kMixed, Transport::kPolled}) {
      CAPTURE(transport_name(transport));
      CAPTURE(lanes);
      const int ranks = 11;
      Job job(ranks, transport, lanes);
      job.cluster->run([&](int rank) {
        Engine& engine = job.cluster->engine(rank);
        for (int step = 0; step < 3; ++step) {
          alltoall(engine, rank, ranks);
          allreduce(engine, ranks, 3, "small");
          allreduce(engine, ranks, 200'000, "large");
        }
      });
      // Where the data needs no connections, only ranks that have to be woken are connected.
      if (transport != Transport::kPolled) CHECK(job.board->made() == job.board->pairs());
    }
  }
}

TEST_CASE("process sets and sends between ranks that were not connected") {
  const std::uint64_t seed = test_seed();
  std::mt19937_64 random(seed);
  for (int repetition = 0; repetition < 5; ++repetition) {
    const int ranks = 13;
    Job job(ranks);
    std::vector<int> members(ranks);
    std::iota(members.begin(), members.end(), 0);
    std::shuffle(members.begin(), members.end(), random);
    members.resize(2 + random() % 5);
    std::sort(members.begin(), members.end());
    const int distance = 2 + static_cast<int>(random() % (ranks - 3));
    job.cluster->run([&](int rank) {
      Engine& engine = job.cluster->engine(rank);
      const auto set = static_cast<std::uint32_t>(await_value(engine, engine.add_set(members)));
      if (std::find(members.begin(), members.end(), rank) != members.end()) {
        std::vector<float> data(5000, 1);
        perform(engine, {.name = "in the set",
                         .shape = {5000},
                         .input = data.data(),
                         .output = data.data(),
                         .set = set});
        check(data[4999] == static_cast<float>(members.size()), "the set");
      }
      // Around a ring of ranks that are far from each other.
      const auto value = static_cast<float>(rank);
      float received = -1;
      const hp_handle send = submit(
          engine,
          {.op = OpKind::kSend, .shape = {1}, .input = &value, .root = (rank + distance) % ranks});
      const int from = (rank - distance + ranks) % ranks;
      perform(engine, {.op = OpKind::kReceive, .shape = {1}, .output = &received, .root = from});
      await(engine, send);
      check(received == static_cast<float>(from), "recv");
      await_value(engine, engine.remove_set(set));
    });
  }
}

TEST_CASE("different settings of ranks that are not connected fail the start on all ranks") {
  const int ranks = 10;
  std::vector<EngineConfig> configs = make_configs(Transport::kTcp, ranks, test_options());
  const Switchboard board(configs, neighbours(ranks));
  configs[5].options.fusion_threshold = 17;
  std::vector<std::unique_ptr<Engine>> engines;
  for (EngineConfig& config : configs)
    engines.push_back(std::make_unique<Engine>(std::move(config)));
  for (auto& engine : engines) {
    const Status status = failure_of([&] { engine->wait_until_ready(); });
    CHECK(status.code == HP_MISMATCH);
    CHECK(mentions(status, {"fusion threshold", "17", "rank 5"}));
  }
}

TEST_CASE("a rank that fails is named on ranks that are not connected with it") {
  const int ranks = 10;
  Job job(ranks);
  job.cluster->engine(5).abort("it has had enough");
  job.cluster->run([&](int rank) {
    const Status status =
        failure_of([&] { allreduce(job.cluster->engine(rank), ranks, 10, "after the end"); });
    if (!mentions(status, {"rank 5", "it has had enough"})) throw std::runtime_error("text");
  });
}

TEST_CASE("a connection that cannot be made fails the job with the reason") {
  const int ranks = 10;
  Job job(ranks);
  job.board->refuse("nobody listens there");
  job.cluster->run([&](int rank) {
    const Status status = failure_of([&] { alltoall(job.cluster->engine(rank), rank, ranks); });
    if (!mentions(status, {"rank ", ": nobody listens there"})) throw std::runtime_error("text");
  });
}

TEST_CASE("a connection to a rank that does not exist is refused") {
  Job job(10);
  Engine& engine = job.cluster->engine(1);
  for (const int rank : {-1, 1, 10}) {
    CHECK(failure_of([&] { engine.add_connection(rank, {}); }).code == HP_INVALID_ARGUMENT);
    CHECK(failure_of([&] { engine.fail_connection(rank, ""); }).code == HP_INVALID_ARGUMENT);
  }
}
