// Allreduce in the wire format "int8" with error feedback: the same bits as the reference on every
// transport and device, in plans and out of them, also after a batch was withdrawn.
#include <doctest/doctest.h>

#include <cstring>
#include <numeric>
#include <random>

#include "engine/execution/executor.h"
#include "harness/algorithms_run.h"
#include "harness/gpu_job.h"
#include "harness/int8_reference.h"
#include "harness/ranks.h"

using namespace horoplug;
using namespace horoplug::testing;

namespace {

using Floats = std::vector<float>;

// The tensors of a step; the largest takes several chunks.
constexpr std::size_t kCounts[] = {7, 1, 4097, kSlowedDown ? 70'001 : 300'003};
constexpr int kSteps = kSlowedDown ? 8 : 16;

Floats input_of(int rank, std::size_t step, std::size_t tensor) {
  std::mt19937_64 random(static_cast<std::uint64_t>(rank) * 1000 + step * 10 + tensor);
  std::uniform_real_distribution<float> value(-3, 3);
  Floats values(kCounts[tensor]);
  for (float& each : values) each = value(random);
  return values;
}

// Every rank's inputs, and the result that the reference computes, for steps that follow each
// other.
struct Expected {
  explicit Expected(int ranks) : ranks(ranks) {}

  Floats result(std::size_t step, std::size_t tensor) {
    std::vector<Floats> inputs;
    for (int rank = 0; rank < ranks; ++rank) inputs.push_back(input_of(rank, step, tensor));
    return job.allreduce(std::to_string(tensor), inputs,
                         {.prescale = 0.3F, .multiply = 1.5F, .divide = static_cast<float>(ranks)});
  }
  std::vector<Floats> step(std::size_t number) {
    std::vector<Floats> results;
    for (std::size_t tensor = 0; tensor < std::size(kCounts); ++tensor) {
      results.push_back(result(number, tensor));
    }
    return results;
  }

  const int ranks;
  Int8Job job;
};

Order order_of(std::size_t tensor, const Floats& input, Floats& output) {
  Order order;
  order.wire = &int8_format();
  order.name = "gradient." + std::to_string(tensor);
  order.reduce = ReduceOp::kAverage;
  order.prescale = static_cast<double>(0.3F);
  order.postscale = 1.5;
  order.shape = {static_cast<std::int64_t>(input.size())};
  order.input = input.data();
  order.output = output.data();
  return order;
}

// All tensors of a step at once, so that they share batches; odd steps in place.
void check_step(Engine& engine, int rank, std::size_t step, const std::vector<Floats>& expected) {
  std::vector<Floats> inputs, outputs;
  for (std::size_t tensor = 0; tensor < std::size(kCounts); ++tensor) {
    inputs.push_back(input_of(rank, step, tensor));
    outputs.emplace_back(inputs.back().size());
  }
  std::vector<hp_handle> handles;
  for (std::size_t tensor = 0; tensor < inputs.size(); ++tensor) {
    Floats& output = step % 2 == 1 ? inputs[tensor] : outputs[tensor];
    handles.push_back(submit(engine, order_of(tensor, inputs[tensor], output)));
  }
  for (const hp_handle handle : handles) {
    await(engine, handle);
    engine.handles().release(handle);
  }
  if ((step % 2 == 1 ? inputs : outputs) != expected) {
    throw std::runtime_error("step " + std::to_string(step) + " is wrong");
  }
}

void run_steps(Cluster& cluster, const std::vector<std::vector<Floats>>& expected,
               std::size_t first = 0) {
  cluster.run([&](int rank) {
    Engine& engine = cluster.engine(rank);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      check_step(engine, rank, first + i, expected[i]);
      if (i % 8 != 6) continue;
      // Another name breaks the plan.
      Floats other{1};
      Order order;
      order.name = "other";
      order.shape = {1};
      order.input = order.output = other.data();
      perform(engine, order);
    }
  });
}

std::vector<std::vector<Floats>> expected_steps(Expected& expected, std::size_t first,
                                                std::size_t count) {
  std::vector<std::vector<Floats>> steps;
  for (std::size_t step = first; step < first + count; ++step) {
    steps.push_back(expected.step(step));
  }
  return steps;
}

}  // namespace

TEST_CASE("int8 allreduces equal the reference on every transport, in plans and out of them") {
  for (const int ranks : kSlowedDown ? std::vector{3} : std::vector{1, 2, 3, 5}) {
    Expected expected(ranks);
    const auto steps = expected_steps(expected, 0, kSteps);
    for (const Transport transport : kTransports) {
      CAPTURE(transport_name(transport));
      CAPTURE(ranks);
      Cluster cluster(transport, ranks);
      CHECK_NOTHROW(run_steps(cluster, steps));
    }
  }
}

TEST_CASE(
    "an int8 allreduce runs by algorithms that sum each element at once, whatever is forced") {
  Expected expected(4);
  const auto steps = expected_steps(expected, 0, 2);
  for (const Algorithm& algorithm : algorithms()) {
    if (algorithm.on_gpu || algorithm.kind != OpKind::kAllreduce) continue;
    CAPTURE(algorithm.name);
    Cluster cluster(Transport::kMixed, 4, options_forcing(algorithm.name));
    AlgorithmsRun run(cluster.engine(0));
    CHECK_NOTHROW(run_steps(cluster, steps));
    CHECK(run.take() == std::set<std::string>{"STREAM_ALLREDUCE pairwise"});
  }
}

TEST_CASE("residuals of error feedback are reset, saved and loaded, and end with the process set") {
  constexpr int kRanks = 3;
  Expected expected(kRanks);
  const auto before = expected_steps(expected, 0, 3);
  const auto after = expected_steps(expected, 3, 2);
  expected.job.reset();
  const auto anew = expected_steps(expected, 5, 2);
  std::vector<Bytes> saved(kRanks);
  {
    Cluster cluster(Transport::kThreads, kRanks);
    CHECK_NOTHROW(run_steps(cluster, before));
    for (int rank = 0; rank < kRanks; ++rank) {
      saved[static_cast<std::size_t>(rank)] = cluster.engine(rank).members(0)->states->save();
    }
  }
  Cluster cluster(Transport::kInproc, kRanks);
  for (int rank = 0; rank < kRanks; ++rank) {
    cluster.engine(rank).members(0)->states->load(saved[static_cast<std::size_t>(rank)]);
  }
  CHECK_NOTHROW(run_steps(cluster, after, 3));
  for (int rank = 0; rank < kRanks; ++rank) cluster.engine(rank).members(0)->states->reset();
  CHECK_NOTHROW(run_steps(cluster, anew, 5));

  cluster.run([&](int rank) {
    Engine& engine = cluster.engine(rank);
    const auto set = static_cast<std::uint32_t>(await_value(engine, engine.add_set({0, 1, 2})));
    const std::weak_ptr<TensorStates> states = engine.members(set)->states;
    Floats data(100, 1.5F);
    Order order = order_of(0, data, data);
    order.set = set;
    perform(engine, order);
    if (states.lock()->save().size() < data.size() * sizeof(float)) {
      throw std::runtime_error("the set keeps nothing");
    }
    await(engine, engine.remove_set(set));
    if (!comes_to([&] { return states.expired(); })) throw std::runtime_error("states remain");
  });
}

TEST_CASE("no residuals are kept for generated names, joined ranks and other wire formats") {
  Cluster cluster(Transport::kThreads, 2);
  cluster.run([&](int rank) {
    Engine& engine = cluster.engine(rank);
    const std::size_t nothing = TensorStates().save().size();
    Floats data(100, 1.5F);
    Order order = order_of(0, data, data);
    order.name.clear();
    perform(engine, order);
    order.name = "cast";
    order.wire = nullptr;
    order.compressed = DType::kFloat16;
    perform(engine, order);
    if (rank == 0) {
      order = order_of(0, data, data);
      std::fill(data.begin(), data.end(), 12.7F);
      perform(engine, order);
      if (std::fabs(data[99] - 12.7F * 0.3F * 1.5F / 2) > 1e-5F) throw std::runtime_error("wrong");
    }
    await_value(engine, engine.join(0));
    const bool keeps = engine.members(0)->states->save().size() > nothing;
    if (keeps != (rank == 0)) throw std::runtime_error("the wrong rank keeps a state");
  });
}

TEST_CASE("a withdrawn batch leaves the residuals as they were") {
  constexpr std::size_t kRanks = 3;
  for (const std::size_t hosts : {std::size_t{1}, kRanks}) {
    CAPTURE(hosts);
    Ranks ranks(kRanks, hosts);
    Expected expected(kRanks);
    struct Part {
      Floats input, output;
      Batch batch;
      std::unique_ptr<Fiber> fiber;
    };
    std::vector<Part> parts(kRanks);
    std::vector<MembersPtr> members;
    for (int rank = 0; rank < static_cast<int>(kRanks); ++rank) {
      members.push_back(make_members(0, {0, 1, 2}, rank));
    }
    constexpr std::size_t kTensor = 2;
    const auto start = [&](std::size_t rank, std::size_t step, const Channel& channel) {
      Part& part = parts[rank];
      part.input = input_of(static_cast<int>(rank), step, kTensor);
      part.output.assign(part.input.size(), 0);
      part.batch.operations = {
          operation_of(order_of(kTensor, part.input, part.output), members[rank])};
      ranks.comm(rank).begin(channel);
      part.fiber = std::make_unique<Fiber>(run_batch(ranks.comm(rank), part.batch, nullptr));
    };
    const auto run = [&] {
      for (int round = 0; round < 300; ++round) {
        ranks.pump();
        for (Part& part : parts) {
          if (part.fiber && part.fiber->poll()) part.fiber.reset();
        }
      }
    };
    for (std::size_t step = 0; step < 4; ++step) {
      // All ranks but the last one encode, and the plan ends.
      const Channel planned{
          .set = 0, .epoch = static_cast<std::uint32_t>(step + 1), .batch = 1, .check = 7};
      for (std::size_t rank = 0; rank + 1 < kRanks; ++rank) start(rank, step, planned);
      run();
      for (std::size_t rank = 0; rank < kRanks; ++rank) {
        if (parts[rank].fiber) {
          parts[rank].fiber.reset();
          ranks.comm(rank).withdraw();
        }
        ranks.comm(rank).drop(planned);
        ranks.comm(rank).resume();
      }
      const Channel negotiated{.set = 0, .epoch = 0, .batch = step + 1, .check = 8};
      for (std::size_t rank = 0; rank < kRanks; ++rank) start(rank, step, negotiated);
      run();
      const Floats result = expected.result(step, kTensor);
      for (std::size_t rank = 0; rank < kRanks; ++rank) {
        const bool done = !parts[rank].fiber, right = parts[rank].output == result;
        CHECK(done);
        CHECK(right);
        ranks.comm(rank).end();
      }
    }
  }
}

TEST_CASE("int8 allreduces of GPU tensors equal the reference") {
  for (const int ranks : {1, 3}) {
    for (const Transport transport : {Transport::kThreads, Transport::kTcp}) {
      CAPTURE(ranks);
      CAPTURE(transport_name(transport));
      Expected expected(ranks);
      const auto steps = expected_steps(expected, 0, 4);
      GpuJob job({.transport = transport, .ranks = ranks, .has_nccl = true});
      job.run([&](int rank) {
        for (std::size_t step = 0; step < steps.size(); ++step) {
          for (std::size_t tensor = 0; tensor < std::size(kCounts); ++tensor) {
            const Floats input = input_of(rank, step, tensor);
            Floats output(input.size());
            std::vector<std::byte> bytes(input.size() * sizeof(float));
            std::memcpy(bytes.data(), input.data(), bytes.size());
            bytes = job.perform(rank, order_of(tensor, input, output), bytes, step % 2 == 1);
            std::memcpy(output.data(), bytes.data(), bytes.size());
            if (output != steps[step][tensor]) {
              throw std::runtime_error("tensor " + std::to_string(tensor) + " is wrong");
            }
          }
        }
      });
    }
  }
}

TEST_CASE("int8 is for sums and averages of float32") {
  Cluster cluster(Transport::kThreads, 1);
  Floats data(10, 1);
  for (const ReduceOp op :
       {ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct, ReduceOp::kAdasum}) {
    Order order = order_of(0, data, data);
    order.reduce = op;
    const Status status = failure_of([&] { perform(cluster.engine(0), order); });
    CHECK(status.code == HP_UNSUPPORTED);
    CHECK(mentions(status, {"int8"}));
  }
  std::vector<double> doubles(10, 1.0 / 3);
  Order order = order_of(0, data, data);
  order.dtype = DType::kFloat64;
  order.prescale = order.postscale = 1;
  order.input = order.output = doubles.data();
  perform(cluster.engine(0), order);
  CHECK(doubles == std::vector<double>(10, 1.0 / 3));
}
