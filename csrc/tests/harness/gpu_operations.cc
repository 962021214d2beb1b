#include "tests/harness/gpu_operations.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <thread>

#include "tests/harness/elements.h"
#include "tests/harness/random_elements.h"

namespace horoplug::testing {
namespace {

using Bytes = std::vector<std::byte>;
using Random = std::mt19937_64;

constexpr OpKind kOps[] = {OpKind::kAllreduce, OpKind::kBroadcast, OpKind::kAllgather,
                           OpKind::kAlltoall, OpKind::kReducescatter};
template <typename T, std::size_t count>
T one_of(Random& random, const T (&choices)[count]) {
  return choices[random() % count];
}

// Draws an operation and returns the part of each rank.
std::vector<RankOperation> random_operation(Random& random, int ranks, Elements elements,
                                            int number) {
  Order order;
  order.name = "t" + std::to_string(number);
  order.op = kOps[static_cast<std::size_t>(number) % std::size(kOps)];
  order.dtype = one_of(random, kAllDTypes);
  const bool reduces = order.op == OpKind::kAllreduce || order.op == OpKind::kReducescatter;
  if (reduces) order.reduce = one_of(random, kReductions);
  // 8-bit floats have too few bits for sums that are exact in every order.
  if (reduces && is_float8(order.dtype)) order.dtype = DType::kFloat16;
  if (reduces && !has_reduction(order.reduce, order.dtype)) order.reduce = ReduceOp::kSum;
  if (order.op == OpKind::kAllreduce && random() % 3 == 0) {
    order.dtype = DType::kFloat32;
    order.compressed = random() % 2 == 0 ? DType::kFloat16 : DType::kBFloat16;
  }
  if (reduces && random() % 3 == 0) order.prescale = 0.5;
  if (reduces && random() % 3 == 0) order.postscale = 3;
  order.root = static_cast<int>(random() % static_cast<unsigned>(ranks));
  const std::size_t row = 1 + random() % 40;
  const auto rows = [&](std::size_t parts) {
    const std::size_t count = elements.least + random() % (elements.most - elements.least);
    return static_cast<std::int64_t>(count / row / parts);
  };
  const std::int64_t same = rows(1);
  std::vector<RankOperation> parts;
  for (int rank = 0; rank < ranks; ++rank) {
    order.splits.clear();
    std::int64_t own = order.op == OpKind::kAllgather ? rows(1) : same;
    if (order.op == OpKind::kAlltoall) {
      for (int to = 0; to < ranks; ++to) {
        order.splits.push_back(rows(static_cast<std::size_t>(ranks)));
      }
      own = std::accumulate(order.splits.begin(), order.splits.end(), std::int64_t{0});
    }
    order.shape = {own, static_cast<std::int64_t>(row)};
    const auto count = static_cast<std::size_t>(own) * row;
    Bytes input(count * dtype_size(order.dtype));
    fill(order.dtype, input.data(), count, random);
    parts.push_back({order, std::move(input)});
  }
  return parts;
}

}  // namespace

Bytes on_cpu(Engine& engine, const RankOperation& part) {
  Order order = part.order;
  order.name += ".cpu";
  Bytes output(std::max<std::size_t>(part.input.size(), 1));
  const std::byte nothing{};
  order.input = part.input.empty() ? &nothing : part.input.data();
  if (order.op == OpKind::kAllreduce || order.op == OpKind::kBroadcast) {
    order.output = output.data();
  }
  return perform(engine, order);
}

void run_random(GpuJob& job, int count, int at_once, Elements elements) {
  const int ranks = job.size();
  Random random(seed());
  std::vector<std::vector<RankOperation>> all;
  for (int i = 0; i < count; ++i) {
    all.push_back(random_operation(random, ranks, elements, i));
  }
  job.run([&](int rank) {
    const auto part = [&](int i) -> const RankOperation& {
      return all[static_cast<std::size_t>(i)][static_cast<std::size_t>(rank)];
    };
    for (int first = 0; first < count; first += at_once) {
      const int end = std::min(first + at_once, count);
      std::vector<Bytes> expected;
      for (int i = first; i < end; ++i) expected.push_back(on_cpu(job.engine(rank), part(i)));
      std::vector<std::unique_ptr<InFlight>> running;
      for (int i = first; i < end; ++i) {
        running.push_back(std::make_unique<InFlight>(job, rank, part(i), i % 2 == 0));
      }
      for (int i = first; i < end; ++i) {
        const auto at = static_cast<std::size_t>(i - first);
        const Order& order = part(i).order;
        INFO("seed " << seed() << ": rank " << rank << ", " << std::string(op_kind_name(order.op))
                     << " " << std::string(dtype_name(order.dtype)) << " "
                     << std::string(reduce_op_name(order.reduce)) << " " << order.name);
        const bool equal = running[at]->result() == expected[at];
        CHECK(equal);
      }
    }
  });
}

RankOperation sum(const std::string& name, std::size_t count, float value) {
  Order order;
  order.name = name;
  order.shape = {static_cast<std::int64_t>(count)};
  Bytes input(count * sizeof value);
  for (std::size_t i = 0; i < count; ++i) {
    std::memcpy(input.data() + i * sizeof value, &value, sizeof value);
  }
  return {order, std::move(input)};
}

bool sum_is_correct(GpuJob& job, int rank, const std::string& name, std::size_t count,
                    std::uint32_t set, int ranks) {
  const auto size = static_cast<float>(ranks == 0 ? job.size() : ranks);
  RankOperation part = sum(name, count, 1);
  part.order.set = set;
  return InFlight(job, rank, part, false).result() == sum(name, count, size).input;
}

void break_plans(GpuJob& job, int steps) {
  constexpr int kTensors = 4;
  const auto ranks = static_cast<float>(job.size());
  job.run([&](int rank) {
    Random random(seed() + static_cast<unsigned>(rank));
    for (int step = 0; step < steps; ++step) {
      std::vector<int> order(kTensors);
      std::iota(order.begin(), order.end(), 0);
      if (step % 8 == 7) std::shuffle(order.begin(), order.end(), random);
      std::vector<std::unique_ptr<InFlight>> running;
      for (const int i : order) {
        running.push_back(std::make_unique<InFlight>(
            job, rank, sum("t" + std::to_string(i), 300, static_cast<float>(step + i)), true));
        if (random() % 4 == 0) std::this_thread::yield();
      }
      for (std::size_t i = 0; i < running.size(); ++i) {
        const auto value = ranks * static_cast<float>(step + order[i]);
        const bool equal = running[i]->result() == sum("", 300, value).input;
        CHECK(equal);
      }
    }
    CHECK(job.engine(rank).stats().planned_batches > 0);
  });
}

std::size_t count_peer_waits(GpuJob& job) { return job.gpu().count("wait for a word"); }

CUresult refuse_to_open(CUdeviceptr*, CUipcMemHandle, unsigned) { return 201; }

std::atomic<bool> drop_flag_writes{false};

void intercept_flag_writes(cuda::DriverApi& api) {
  static CUresult (*write)(CUstream, CUdeviceptr, std::uint32_t, unsigned) = nullptr;
  write = api.StreamWriteValue32;
  api.StreamWriteValue32 = [](CUstream stream, CUdeviceptr word, std::uint32_t value,
                              unsigned flags) -> CUresult {
    return drop_flag_writes.load() ? 0 : write(stream, word, value, flags);
  };
}

std::size_t count_of(const std::string& part, const std::string& text) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) {
    ++count;
  }
  return count;
}

}  // namespace horoplug::testing
