// Tests of shared buffers in whole engines: creation, release, and operations, which give the same
// bits as operations in private memory.
#include <doctest/doctest.h>

#include <cstring>

#include "harness/cluster.h"
#include "harness/elements.h"

using namespace horoplug;
using namespace horoplug::testing;

namespace {

using BufferPtr = std::shared_ptr<SharedBuffer>;

BufferPtr create(Engine& engine, std::uint64_t bytes) {
  const hp_handle handle = engine.create_buffer(bytes);
  await(engine, handle);
  BufferPtr buffer = std::move(engine.handles().done(handle)->buffer);
  engine.handles().release(handle);
  return buffer;
}

std::vector<std::byte> random_values(DType dtype, std::size_t count, int rank, std::uint64_t salt) {
  std::mt19937_64 random(test_seed() + salt * 100 + static_cast<std::uint64_t>(rank));
  std::normal_distribution<double> normal(1, 3);
  // The period is prime, so that values at a wrong offset differ.
  return make_array(dtype, count, 4099, [&](std::size_t) { return normal(random); });
}

Order in_place(DType dtype, ReduceOp op, std::byte* data, std::size_t count) {
  Order order;
  order.dtype = dtype;
  order.reduce = op;
  order.shape = {static_cast<std::int64_t>(count)};
  order.input = order.output = data;
  return order;
}

// Reduces the same values in private memory and at `at` in a buffer, and compares the results. If
// `at` is nullptr, this rank uses private memory for both.
void compare(Engine& engine, int rank, DType dtype, ReduceOp op, std::byte* at, std::size_t count,
             double prescale = 1, std::uint32_t set = 0) {
  auto plain = random_values(dtype, count, rank, count);
  auto other = plain;
  std::byte* const data = at != nullptr ? at : other.data();
  if (count > 0) std::memcpy(data, plain.data(), plain.size());
  Order order = in_place(dtype, op, plain.data(), count);
  order.prescale = prescale;
  order.postscale = 1.5;
  order.set = set;
  const auto expected = perform(engine, order);
  order.input = order.output = data;
  const std::string wrong = difference(dtype, perform(engine, order), expected);
  if (wrong.empty()) return;
  throw std::runtime_error(std::string(reduce_op_name(op)) + " of " + std::to_string(count) + " " +
                           dtype_name(dtype) + " in a buffer: " + wrong);
}

constexpr Transport kWithBuffers[] = {Transport::kThreads, Transport::kShm, Transport::kMixed};

}  // namespace

TEST_CASE("an allreduce in a shared buffer gives the same bits as in private memory") {
  for (const Transport transport : kWithBuffers) {
    for (const int ranks : {1, 2, 3, 4}) {
      if (kSlowedDown && ranks % 2 == 1) continue;
      CAPTURE(transport_name(transport));
      CAPTURE(ranks);
      Cluster cluster(transport, ranks);
      CHECK_NOTHROW(cluster.run([&](int rank) {
        Engine& engine = cluster.engine(rank);
        const BufferPtr buffer = create(engine, 5'000'000);
        CHECK(buffer->bytes() == 5'000'000);
        CHECK(reinterpret_cast<std::uintptr_t>(buffer->data()) % 4096 == 0);
        CHECK(buffer->shared() == (ranks > 1 && transport == Transport::kShm));
        for (std::size_t i = 0; i < buffer->bytes(); i += 997) {
          CHECK(buffer->data()[i] == std::byte{0});
        }
        for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kFloat16,
                                  DType::kBFloat16, DType::kInt32, DType::kUInt8}) {
          if (kSlowedDown && dtype != DType::kFloat32 && dtype != DType::kFloat16) continue;
          for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin}) {
            for (const std::size_t count : {0, 3, 1025, 5'003, 70'001, 300'007}) {
              if (kSlowedDown && count > 100'000 && op != ReduceOp::kSum) continue;
              compare(engine, rank, dtype, op, buffer->data() + 8 * (count % 5), count);
            }
          }
          compare(engine, rank, dtype, ReduceOp::kSum, buffer->data(), 9'001, 0.5);
        }
      }));
    }
  }
}

TEST_CASE("a rank can use private memory, another buffer or another offset than its peers") {
  for (const int ranks : {2, 3}) {
    Cluster cluster(Transport::kShm, ranks);
    CHECK_NOTHROW(cluster.run([&](int rank) {
      Engine& engine = cluster.engine(rank);
      const BufferPtr first = create(engine, 3'000'000);
      const BufferPtr second = create(engine, 3'000'000);
      for (const std::size_t count : {1025, 100'001, 700'001}) {
        for (int outside = 0; outside < ranks; ++outside) {
          compare(engine, rank, DType::kFloat32, ReduceOp::kSum,
                  rank == outside ? nullptr : first->data(), count);
          compare(engine, rank, DType::kFloat32, ReduceOp::kSum,
                  rank == outside ? second->data() : first->data(), count);
          compare(engine, rank, DType::kFloat32, ReduceOp::kSum,
                  first->data() + (rank == outside ? 64 : 128), count);
          compare(engine, rank, DType::kFloat32, ReduceOp::kSum, second->data(), count);
        }
      }
    }));
  }
}

TEST_CASE("grouped tensors can be apart and out of order in a buffer") {
  for (const int ranks : {2, 4}) {
    Cluster cluster(Transport::kShm, ranks);
    CHECK_NOTHROW(cluster.run([&](int rank) {
      Engine& engine = cluster.engine(rank);
      const BufferPtr buffer = create(engine, 2'000'000);
      const std::size_t offsets[] = {800'000, 64, 1'200'000, 400'000};
      const std::int64_t counts[] = {90'001, 7, 123'457, 50'000};
      std::vector<hp_tensor> tensors;
      std::memset(buffer->data(), 0x7f, buffer->bytes());
      for (std::size_t k = 0; k < 4; ++k) {
        auto* const data = reinterpret_cast<float*>(buffer->data() + offsets[k]);
        for (std::int64_t i = 0; i < counts[k]; ++i) {
          data[i] = static_cast<float>(i % 100 + static_cast<std::int64_t>(k) + 2 * rank);
        }
        tensors.push_back({data, data, &counts[k], 1, 0});
      }
      hp_submission submission{};
      submission.struct_size = sizeof submission;
      submission.dtype = HP_FLOAT32;
      submission.reduce_op = HP_AVERAGE;
      submission.device = -1;
      submission.tensors = tensors.data();
      submission.tensor_count = 4;
      const hp_handle handle = engine.submit(make_operation(submission, engine.members(0)));
      await(engine, handle);
      engine.handles().release(handle);
      std::size_t wrong = 0;
      std::size_t inside = 0;
      for (std::size_t k = 0; k < 4; ++k) {
        const auto* const data = reinterpret_cast<float*>(buffer->data() + offsets[k]);
        for (std::int64_t i = 0; i < counts[k]; ++i) {
          wrong +=
              data[i] != static_cast<float>(i % 100 + static_cast<std::int64_t>(k) + ranks - 1);
        }
        inside += static_cast<std::size_t>(counts[k]) * sizeof(float);
      }
      CHECK(wrong == 0);
      std::size_t untouched = 0;
      for (std::size_t i = 0; i < buffer->bytes(); ++i) {
        untouched += buffer->data()[i] == std::byte{0x7f};
      }
      CHECK(untouched >= buffer->bytes() - inside);
    }));
  }
}

TEST_CASE("operations of process sets can use buffers") {
  Cluster cluster(Transport::kShm, 4);
  CHECK_NOTHROW(cluster.run([&](int rank) {
    Engine& engine = cluster.engine(rank);
    const BufferPtr before = create(engine, 1'000'001);
    const auto set = static_cast<std::uint32_t>(await_value(engine, engine.add_set({1, 3})));
    const BufferPtr after = create(engine, 500'000);
    for (const std::size_t count : {2'000, 100'000}) {
      if (rank % 2 == 1) {
        compare(engine, rank, DType::kFloat32, ReduceOp::kSum, before->data(), count, 1, set);
        compare(engine, rank, DType::kFloat32, ReduceOp::kSum, after->data(), count, 1, set);
      }
      compare(engine, rank, DType::kFloat32, ReduceOp::kSum, after->data(), count);
    }
  }));
}

TEST_CASE("buffers of different sizes are a mismatch, and a size of zero is rejected") {
  Cluster cluster(Transport::kShm, 2);
  cluster.run([&](int rank) {
    Engine& engine = cluster.engine(rank);
    const Status status = failure_of([&] { create(engine, rank == 0 ? 4096 : 8192); });
    CHECK(status.code == HP_MISMATCH);
    CHECK(mentions(status, {"buffer size", "4096", "8192"}));
    CHECK(failure_of([&] { create(engine, 0); }).code == HP_INVALID_ARGUMENT);
    CHECK(create(engine, 64)->bytes() == 64);
  });
}

TEST_CASE("a buffer stays valid after its engine, and released buffers free their memory") {
  std::vector<BufferPtr> kept(2);
  {
    Cluster cluster(Transport::kShm, 2);
    CHECK_NOTHROW(cluster.run([&](int rank) {
      Engine& engine = cluster.engine(rank);
      const auto me = static_cast<std::size_t>(rank);
      for (int i = 0; i < 20; ++i) {
        const BufferPtr passing = create(engine, 300'000);
        compare(engine, rank, DType::kFloat32, ReduceOp::kSum, passing->data(), 70'000);
      }
      kept[me] = create(engine, 300'000);
      // Rank 0 can release its buffer while rank 1 still uses its own.
      const BufferPtr uneven = create(engine, 300'000);
      if (rank == 1) std::memset(uneven->data(), 1, uneven->bytes());
      compare(engine, rank, DType::kFloat32, ReduceOp::kSum, rank == 0 ? nullptr : uneven->data(),
              70'000);
      std::memset(kept[me]->data(), rank + 1, kept[me]->bytes());
    }));
  }
  for (std::size_t rank = 0; rank < kept.size(); ++rank) {
    for (std::size_t i = 0; i < kept[rank]->bytes(); i += 1000) {
      CHECK(kept[rank]->data()[i] == static_cast<std::byte>(rank + 1));
    }
  }
}
