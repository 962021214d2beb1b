// Tests of the launcher's driver calls, their order, and its handling of failures. The kernels run
// on the host.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "base/status.h"
#include "device/cuda/runtime/launcher.h"
#include "tests/harness/host_grid.h"
#include "tests/harness/random_elements.h"
#include "tests/harness/recorded_driver.h"

namespace {

using namespace horoplug;
using namespace horoplug::cuda;
using horoplug::testing::RecordedDriver;
using horoplug::testing::run_on_cpu;
using horoplug::testing::seed;
using Calls = std::vector<std::string>;

std::uint64_t address_of(const void* p) { return reinterpret_cast<std::uintptr_t>(p); }

std::shared_ptr<const Image> code(const std::string& kernel, int capability) {
  return std::make_shared<Image>("image of " + kernel + " for " + std::to_string(capability));
}

// A launcher over a recorded driver that runs kernels on the host.
struct Gpu {
  Gpu() {
    driver.on_launch = [this](const std::string& name, unsigned blocks, void* args) {
      CHECK(run_on_cpu(name, args, blocks, random));
      CHECK(driver.pushed() == 1);
    };
  }
  std::mt19937_64 random{seed()};
  RecordedDriver driver;
  Context context{driver.api(), 0};
  Launcher launcher{context, code};
};

// Tensors, each with its own target for packing.
struct Tensors {
  explicit Tensors(std::size_t count) : from(count, std::vector<float>(5000)), to(5000 * count) {
    for (std::size_t i = 0; i < count; ++i) {
      std::iota(from[i].begin(), from[i].end(), static_cast<float>(i));
      transfers.push_back({address_of(from[i].data()), address_of(to.data() + 5000 * i), 5000});
    }
  }
  std::vector<std::vector<float>> from;
  std::vector<float> to;
  std::vector<Transfer> transfers;
};

TEST_CASE("a batch takes one launch, and code and tables are copied to the GPU once") {
  Gpu gpu;
  Tensors tensors(20);
  const Finish half{0.5, 1};
  gpu.launcher.move(DType::kFloat32, DType::kFloat32, half, tensors.transfers);
  for (std::size_t i = 0; i < 20; ++i) {
    CHECK(tensors.to[5000 * i + 4999] == static_cast<float>(i + 4999) / 2);
  }
  const Calls first = gpu.driver.take_calls();
  REQUIRE(first.size() == 4);
  CHECK(first[0] == "copy in stream 1");
  CHECK(first[1].ends_with("in stream 1"));
  CHECK(first[2] == "load image of scale_float32 for 90");
  CHECK(first[3] == "launch scale_float32 <<<16>>> stream 1");  // eight blocks per multiprocessor

  gpu.launcher.move(DType::kFloat32, DType::kFloat32, half, tensors.transfers);
  CHECK(gpu.driver.take_calls() == Calls{"launch scale_float32 <<<16>>> stream 1"});
  CHECK(gpu.launcher.table_copies() == 1);

  // Another kernel for the same tensors uses the same table.
  gpu.launcher.move(DType::kFloat32, DType::kFloat32, {}, tensors.transfers);
  CHECK(gpu.driver.take_calls() ==
        Calls{"load image of copy_32 for 90", "launch copy_32 <<<16>>> stream 1"});

  tensors.transfers.pop_back();
  gpu.launcher.move(DType::kFloat32, DType::kFloat32, {}, tensors.transfers);
  CHECK(gpu.launcher.table_copies() == 2);
}

TEST_CASE("an empty batch launches nothing, and a small one has few blocks") {
  Gpu gpu;
  Tensors tensors(1);
  gpu.launcher.move(DType::kFloat32, DType::kFloat32, {}, {});
  const std::vector<Transfer> empty = {{0, 0, 0}};
  gpu.launcher.move(DType::kFloat32, DType::kFloat32, {}, empty);
  CHECK(gpu.driver.take_calls() == Calls{});
  gpu.launcher.move(DType::kFloat32, DType::kFloat32, {}, tensors.transfers);
  CHECK(gpu.driver.take_calls().back() == "launch copy_32 <<<2>>> stream 1");
}

TEST_CASE("reductions and Adasum launch their kernels and give correct results") {
  Gpu gpu;
  Tensors tensors(3);
  const std::vector<std::uint64_t> sources = {address_of(tensors.from[0].data()),
                                              address_of(tensors.from[1].data()),
                                              address_of(tensors.from[2].data())};
  const std::vector<Transfer> one = {{0, address_of(tensors.to.data()), 5000}};
  gpu.launcher.reduce(ReduceOp::kAverage, DType::kFloat32, {1, 3}, sources, one);
  CHECK(tensors.to[10] == 11);
  CHECK(gpu.driver.take_calls().back() == "launch reduce_sum_float32 <<<2>>> stream 1");

  // Adasum of two orthogonal vectors is their sum.
  std::vector<float> a(200, 0), b(200, 0), sum(200, 0);
  std::fill(a.begin(), a.begin() + 100, 2);
  std::fill(b.begin() + 100, b.end(), 3);
  std::vector<Dots> dots(1);
  const std::vector<Transfer> whole = {{0, address_of(sum.data()), 200}};
  gpu.launcher.dots(DType::kFloat32, address_of(a.data()), address_of(b.data()), whole,
                    address_of(dots.data()));
  CHECK(dots[0].aa == 400);
  CHECK(dots[0].ab == 0);
  CHECK(dots[0].bb == 900);
  gpu.launcher.blend(DType::kFloat32, address_of(a.data()), address_of(b.data()), whole,
                     address_of(dots.data()));
  CHECK((sum[99] == 2 && sum[100] == 3));
  const Calls calls = gpu.driver.take_calls();
  Calls launches;
  std::copy_if(calls.begin(), calls.end(), std::back_inserter(launches),
               [](const std::string& call) { return call.starts_with("launch"); });
  CHECK(launches == Calls{"launch dots_float32 <<<1>>> stream 1",
                          "launch sum_of_tiles <<<1>>> stream 1",
                          "launch blend_float32 <<<1>>> stream 1"});
}

TEST_CASE("launches are ordered by events, and the host does not wait") {
  Gpu gpu;
  Tensors tensors(2);
  const Event ready(gpu.context), done(gpu.context);
  const cuda::Stream framework(gpu.context);
  ready.record(framework.handle());
  gpu.launcher.stream().wait_for(ready.handle());
  gpu.launcher.move(DType::kFloat32, DType::kFloat32, {}, tensors.transfers);
  done.record(gpu.launcher.stream().handle());
  framework.wait_for(done.handle());
  const Calls calls = gpu.driver.take_calls();
  const auto at = [&](const std::string& part) {
    return std::find_if(
               calls.begin(), calls.end(),
               [&](const std::string& call) { return call.find(part) != std::string::npos; }) -
           calls.begin();
  };
  CHECK(at("stream 1 waits for event") < at("copy in stream 1"));
  CHECK(at("copy in stream 1") < at("launch copy_32"));
  CHECK(at("launch copy_32") < static_cast<std::ptrdiff_t>(calls.size()) - 2);
  CHECK(calls.back().starts_with("stream 4 waits for event"));
  CHECK(at("host waits") == static_cast<std::ptrdiff_t>(calls.size()));
}

TEST_CASE("the host memory of a table is not reused before its copy to the GPU is done") {
  RecordedDriver driver;
  const Context context(driver.api(), 0);
  const cuda::Stream stream(context);
  TablesOnDevice tables(context, stream.handle(), 2);
  const auto table = [](std::uint64_t n) { return std::vector<Chunk>{{n, n, n, 0, 0}}; };
  const Chunk* const first = tables.place(table(1));
  const Chunk* const second = tables.place(table(2));
  CHECK((first != second));
  CHECK((tables.place(table(1)) == first));
  CHECK(tables.copies() == 2);
  // All places are used: the least recently used table is replaced if its copy is done.
  CHECK((tables.place(table(3)) == second));
  driver.set_events_done(false);
  const Chunk* const fourth = tables.place(table(4));
  CHECK((fourth != first && fourth != second));
  CHECK(first->count == 1);
  CHECK(second->count == 3);
  CHECK(fourth->count == 4);
}

TEST_CASE("a table that does not fit into existing memory gets new memory") {
  RecordedDriver driver;
  const Context context(driver.api(), 0);
  const cuda::Stream stream(context);
  TablesOnDevice tables(context, stream.handle(), 1);
  const std::vector<Chunk> small = {{1, 1, 1, 0, 0}}, large(1000, Chunk{2, 2, 2, 0, 0});
  const Chunk* const first = tables.place(small);
  const Chunk* const second = tables.place(large);
  REQUIRE((second != first));
  CHECK(first->count == 1);
  CHECK(second[999].count == 2);
}

TEST_CASE("a table whose copy failed is copied again") {
  RecordedDriver driver;
  const Context context(driver.api(), 0);
  const cuda::Stream stream(context);
  TablesOnDevice tables(context, stream.handle());
  const std::vector<Chunk> table = {{1, 1, 1, 0, 0}};
  driver.fail("cuMemcpyHtoDAsync", 700);
  CHECK_THROWS_AS(tables.place(table), Error);
  driver.fail("cuMemcpyHtoDAsync", kSuccess);
  CHECK_NOTHROW(tables.place(table));
  CHECK(tables.copies() == 1);
}

TEST_CASE("failures name the driver call and the kernel, and all resources are released") {
  const Calls functions = {"cuDeviceGet",         "cuDevicePrimaryCtxRetain",
                           "cuCtxPushCurrent",    "cuStreamCreateWithPriority",
                           "cuEventCreate",       "cuMemAllocAsync",
                           "cuMemHostAlloc",      "cuMemcpyHtoDAsync",
                           "cuEventRecord",       "cuModuleLoadDataEx",
                           "cuModuleGetFunction", "cuLaunchKernel"};
  for (const std::string& function : functions) {
    CAPTURE(function);
    RecordedDriver driver;
    driver.fail(function, 2);
    Tensors tensors(1);
    std::string message;
    try {
      const Context context(driver.api(), 0);
      Launcher launcher(context, code);
      launcher.move(DType::kFloat32, DType::kFloat16, {}, tensors.transfers);
    } catch (const Error& error) {
      CHECK(error.code() == HP_ABORTED);
      message = error.what();
    }
    CAPTURE(message);
    CHECK(message.starts_with(function));
    CHECK(message.ends_with("CUDA_ERROR_RECORDED"));
    if (function == "cuLaunchKernel") {
      CHECK(message.find("cast_float32_float16") != std::string::npos);
    }
    CHECK(driver.pushed() == 0);
    CHECK(driver.alive() == (function == "cuDevicePrimaryCtxRetain" ? 1 : 0));
  }
}

TEST_CASE("a module with several kernels is loaded once") {
  RecordedDriver driver;
  const Context context(driver.api(), 0);
  auto all = std::make_shared<const Image>("image of all");
  Launcher launcher(context, [&](const std::string&, int) { return all; });
  Tensors tensors(1);
  launcher.move(DType::kFloat32, DType::kFloat32, {}, tensors.transfers);
  launcher.move(DType::kFloat32, DType::kBFloat16, {}, tensors.transfers);
  const Calls calls = driver.take_calls();
  CHECK(std::count(calls.begin(), calls.end(), "load image of all") == 1);
}

TEST_CASE("a kernel is loaded once for all launchers of a GPU") {
  RecordedDriver driver;
  const Context context(driver.api(), 0);
  const auto kernels = std::make_shared<LoadedKernels>(context, code);
  Launcher first(context, kernels), second(context, kernels);
  Tensors tensors(1);
  for (Launcher* launcher : {&first, &second}) {
    launcher->move(DType::kFloat32, DType::kFloat32, {}, tensors.transfers);
  }
  const Calls calls = driver.take_calls();
  CHECK(std::count(calls.begin(), calls.end(), "load image of copy_32 for 90") == 1);
}

TEST_CASE("the launcher releases all its resources") {
  RecordedDriver driver;
  {
    const Context context(driver.api(), 0);
    Launcher launcher(context, code);
    Tensors tensors(3);
    launcher.move(DType::kFloat32, DType::kFloat32, {}, tensors.transfers);
    launcher.move(DType::kFloat32, DType::kBFloat16, {}, tensors.transfers);
    CHECK(driver.alive() > 5);
  }
  CHECK(driver.alive() == 0);
  CHECK(driver.pushed() == 0);
}

TEST_CASE("operations without a kernel are rejected") {
  Gpu gpu;
  Tensors tensors(1);
  const std::vector<std::uint64_t> many(kMaxSources + 1, tensors.transfers[0].from);
  CHECK_THROWS_AS(gpu.launcher.reduce(ReduceOp::kSum, DType::kFloat32, {}, many, tensors.transfers),
                  Error);
  CHECK_THROWS_AS(gpu.launcher.dots(DType::kInt32, 0, 0, tensors.transfers, 0), Error);
  CHECK_THROWS_AS(gpu.launcher.move(DType::kFloat64, DType::kFloat16, {}, tensors.transfers),
                  Error);
  CHECK(gpu.driver.pushed() == 0);
}

}  // namespace
