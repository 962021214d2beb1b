// Allreduce by MPI's own algorithms, with an MPI that acts as if two ranks had the same tensors.
#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <system_error>
#include <vector>

#include "base/status.h"
#include "collectives/collective.h"
#include "tests/harness/fake_mpi.h"
#include "tests/harness/kernels_reference.h"

using namespace horoplug;

namespace {

// Doubles its input, as if another rank had the same. Requests complete while `others` is set. NaNs
// keep their bits.
class Twice final : public testing::NoMpi {
 public:
  Request allreduce(void* data, std::size_t elements, DType dtype, ReduceOp op) override {
    CHECK(op == ReduceOp::kSum);
    memory = static_cast<std::byte*>(data);
    reference::with_element(dtype, [&](auto element) {
      using E = decltype(element);
      for (std::size_t i = 0; i < elements; ++i) {
        const auto x = E::get(data, i);
        if (x == x) E::put(data, i, static_cast<typename E::Value>(x + x));
      }
    });
    others = false;
    return {1, true};
  }
  bool test(Request& request) override {
    if (fails) throw std::system_error(std::make_error_code(std::errc::io_error));
    request.open = !others;
    return !request.open;
  }

  std::byte* memory = nullptr;
  bool others = true;
  bool fails = false;
};

struct AllreduceJob {
  AllreduceJob() { comm.set_mpi(&mpi); }

  // Starts an in-place allreduce of one tensor.
  template <typename T>
  std::unique_ptr<Fiber> begin(DType dtype, std::vector<T>& data, ReduceOp op = ReduceOp::kSum,
                               const Finish& finish = {}) {
    layout = std::make_unique<Layout>(dtype, 1.0);
    layout->add(data.data(), data.data(), data.size() * sizeof(T));
    call.kind = OpKind::kAllreduce;
    call.dtype = dtype;
    call.layout = layout.get();
    call.reduce_op = op;
    call.reduce = kernels().reduce[static_cast<int>(ReduceOp::kSum)][static_cast<int>(dtype)];
    call.finish = finish;
    return std::make_unique<Fiber>(cpu_mpi(comm, call));
  }

  Twice mpi;
  Comm comm{0, {{}, {}}, nullptr};
  std::unique_ptr<Layout> layout;
  Call call;
};

template <typename T>
std::vector<T> reduced(DType dtype, std::vector<T> data, ReduceOp op = ReduceOp::kSum,
                       const Finish& finish = {}) {
  AllreduceJob job;
  const auto fiber = job.begin(dtype, data, op, finish);
  CHECK_FALSE(fiber->poll());
  CHECK(fiber->polled());  // MPI does not ring doorbells
  job.mpi.others = true;
  CHECK(fiber->poll());
  return data;
}

}  // namespace

TEST_CASE("results are scaled, NaNs become the canonical NaN, and zeros keep their sign") {
  using Words = std::vector<std::uint32_t>;
  // 1, -0, two NaNs, +0
  const Words floats = {0x3f800000, 0x80000000, 0x7fc12345, 0xffc00001, 0};
  CHECK(reduced(DType::kFloat32, floats) ==
        Words{0x40000000, 0x80000000, 0x7fc00000, 0x7fc00000, 0});
  CHECK(reduced(DType::kFloat32, floats, ReduceOp::kAverage, {1, 2}) ==
        Words{0x3f800000, 0x80000000, 0x7fc00000, 0x7fc00000, 0});
  using Longs = std::vector<std::uint64_t>;
  CHECK(reduced(DType::kFloat64, Longs{0x3ff0000000000000, 0x8000000000000000, 0xfff8000000000001,
                                       0x7ff8000000012345}) ==
        Longs{0x4000000000000000, 0x8000000000000000, 0x7ff8000000000000, 0x7ff8000000000000});
  using Halves = std::vector<std::uint16_t>;
  CHECK(reduced(DType::kFloat16, Halves{0x3c00, 0x8000, 0xfe01, 0}) ==
        Halves{0x4000, 0x8000, 0x7e00, 0});
  CHECK(reduced(DType::kBFloat16, Halves{0x3f80, 0x8000, 0xffc1, 0}) ==
        Halves{0x4000, 0x8000, 0x7fc0, 0});
  CHECK(reduced(DType::kInt32, std::vector<std::int32_t>{3, -5}) ==
        std::vector<std::int32_t>{6, -10});
  CHECK(reduced(DType::kInt32, std::vector<std::int32_t>{3, -5}, ReduceOp::kAverage, {1, 2}) ==
        std::vector<std::int32_t>{3, -5});
}

TEST_CASE("all elements of a large tensor are divided") {
  std::vector<double> data(5 * 512 + 3);
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<double>(i);
  CHECK(reduced(DType::kFloat64, data, ReduceOp::kAverage, {1, 2}) == data);
}

TEST_CASE("memory that MPI may still write to is not reused and is never the user's") {
  AllreduceJob job;
  std::vector<float> data(1000, 1);
  auto fiber = job.begin(DType::kFloat32, data);
  CHECK_FALSE(fiber->poll());
  std::byte* const leased = job.mpi.memory;
  testing::ignore_leak(leased);
  CHECK((leased != reinterpret_cast<std::byte*>(data.data())));
  CHECK(data == std::vector<float>(1000, 1));
  fiber.reset();  // as after the failure of another rank
  std::memset(leased, 0xff, 1000 * sizeof(float));
  fiber = job.begin(DType::kFloat32, data);
  CHECK_FALSE(fiber->poll());
  CHECK((job.mpi.memory != leased));
  job.mpi.others = true;
  CHECK(fiber->poll());
  CHECK(data == std::vector<float>(1000, 2));
  // Memory that was returned is used again.
  std::byte* const returned = job.mpi.memory;
  fiber = job.begin(DType::kFloat32, data);
  CHECK_FALSE(fiber->poll());
  CHECK((job.mpi.memory == returned));
  testing::ignore_leak(returned);
}

TEST_CASE("an MPI error fails the operation and leaves the tensor unchanged") {
  AllreduceJob job;
  job.mpi.fails = true;
  std::vector<float> data(10, 1);
  const auto fiber = job.begin(DType::kFloat32, data);
  CHECK_THROWS_AS(fiber->poll(), Error);
  CHECK(data == std::vector<float>(10, 1));
  testing::ignore_leak(job.mpi.memory);
}
