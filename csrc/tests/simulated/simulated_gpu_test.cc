// The simulated GPU itself: order within and between streams, memory, failures, misuse.
#include "tests/simulated/simulated_gpu.h"

#include <doctest/doctest.h>

#include <chrono>
#include <cstring>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/status.h"
#include "device/cuda/runtime/launcher.h"

namespace {

using namespace horoplug;
using namespace horoplug::cuda;
using horoplug::testing::SimulatedGpu;
using horoplug::testing::SimulatedOptions;

// A GPU with a context that is current.
struct Bench {
  explicit Bench(SimulatedOptions options = {}) : gpu(std::move(options)) {
    gpu.on_misuse([this](const std::string& text) { misuse.push_back(text); });
    REQUIRE(start_driver(gpu.api()) == "");
    context = std::make_unique<Context>(gpu.api(), 0);
    current = std::make_unique<Current>(*context);
  }
  const DriverApi& api() const { return gpu.api(); }
  void copy_on_device(const DeviceMemory& to, const DeviceMemory& from,
                      const Stream& stream) const {
    CHECK(api().MemcpyDtoDAsync(to.address(), from.address(), to.bytes(), stream.handle()) == 0);
  }
  // Synchronises.
  std::vector<unsigned char> content(const DeviceMemory& memory, const Stream& stream) const {
    std::vector<unsigned char> bytes(memory.bytes());
    CHECK(api().MemcpyDtoHAsync(bytes.data(), memory.address(), bytes.size(), stream.handle()) ==
          0);
    return bytes;
  }
  bool said(const std::string& part) const {
    return !misuse.empty() && misuse.back().find(part) != std::string::npos;
  }

  std::vector<std::string> misuse;
  SimulatedGpu gpu;
  std::unique_ptr<Context> context;
  std::unique_ptr<Current> current;
};

constexpr std::size_t kBytes = 100'000;

TEST_CASE("events order streams") {
  Bench bench;
  const Stream first(*bench.context), second(*bench.context);
  const DeviceMemory a(*bench.context, kBytes), b(*bench.context, kBytes);
  const Event written(*bench.context), read(*bench.context);
  for (unsigned char round = 1; round < 50; ++round) {
    CHECK(bench.api().MemsetD8Async(a.address(), round, kBytes, first.handle()) == 0);
    written.record(first.handle());
    second.wait_for(written.handle());
    bench.copy_on_device(b, a, second);
    read.record(second.handle());
    first.wait_for(read.handle());
    if (round % 10 == 0) {
      CHECK(bench.content(b, second) == std::vector<unsigned char>(kBytes, round));
    }
  }
  first.synchronize();
  CHECK(bench.misuse.empty());
}

#if !defined(__SANITIZE_THREAD__)  // which reports that this is a data race
TEST_CASE("without events, streams have no order") {
  Bench bench;
  const Stream first(*bench.context), second(*bench.context);
  const DeviceMemory a(*bench.context, kBytes), b(*bench.context, kBytes);
  CHECK(bench.api().MemsetD8Async(a.address(), 1, kBytes, first.handle()) == 0);
  first.synchronize();
  std::promise<void> read;
  const auto wait = [](void* until) {
    static_cast<std::promise<void>*>(until)->get_future().wait();
  };
  CHECK(bench.api().LaunchHostFunc(first.handle(), wait, &read) == 0);
  CHECK(bench.api().MemsetD8Async(a.address(), 2, kBytes, first.handle()) == 0);
  bench.copy_on_device(b, a, second);
  CHECK(bench.content(b, second)[0] == 1);
  read.set_value();
  first.synchronize();
}
#endif

TEST_CASE("an event stands for its last record, and comes to pass when the stream is there") {
  Bench bench;
  const Stream stream(*bench.context), other(*bench.context);
  const Event event(*bench.context);
  CHECK(event.done());
  event.record(stream.handle());
  stream.synchronize();
  CHECK(event.done());
  bench.gpu.pause();
  event.record(stream.handle());
  CHECK_FALSE(event.done());
  event.record(other.handle());
  CHECK_FALSE(event.done());
  bench.gpu.resume();
  CHECK(bench.api().EventSynchronize(event.handle()) == 0);
  CHECK(event.done());
  CHECK(bench.gpu.host_waits() == 2);
}

TEST_CASE("kernels run in their stream, with the arguments that they were launched with") {
  Bench bench;
  Launcher launcher(*bench.context, SimulatedGpu::code);
  const DeviceMemory from(*bench.context, 4096), to(*bench.context, 4096);
  const std::vector<Transfer> transfers = {{from.address(), to.address(), 4096}};
  launcher.move(DType::kUInt8, DType::kUInt8, {}, transfers);  // loads it, which waits
  bench.gpu.pause();
  CHECK(bench.api().MemsetD8Async(from.address(), 7, 4096, launcher.stream().handle()) == 0);
  launcher.move(DType::kUInt8, DType::kUInt8, {}, transfers);
  CHECK(bench.api().MemsetD8Async(from.address(), 8, 4096, launcher.stream().handle()) == 0);
  bench.gpu.resume();
  CHECK(bench.content(to, launcher.stream()) == std::vector<unsigned char>(4096, 7));
  CHECK(bench.gpu.count("copy_8") == 2);
}

TEST_CASE("memory ends, also that of one device of several") {
  Bench bench({.devices = 2, .memory = 1000});
  auto some = std::make_unique<DeviceMemory>(*bench.context, 600);
  CUdeviceptr more = 0;
  CHECK(bench.api().MemAlloc(&more, 401) == kOutOfMemory);
  CHECK(bench.api().MemAllocAsync(&more, 401, nullptr) == kOutOfMemory);
  CHECK_NOTHROW(DeviceMemory(Context(bench.api(), 1), 1000));
  some.reset();
  CHECK(bench.api().MemAllocAsync(&more, 1000, nullptr) == 0);
  CHECK(bench.api().MemFreeAsync(more, nullptr) == 0);
  CHECK(bench.api().StreamSynchronize(nullptr) == 0);
  CHECK(bench.gpu.bytes_used(0) == 0);
}

TEST_CASE("whose memory is it") {
  Bench bench({.devices = 2});
  const Context second(bench.api(), 1);
  const DeviceMemory memory(second, 100);
  const PinnedMemory pinned(*bench.context, 100);
  int ordinal = -1;
  unsigned type = 0;
  CHECK(bench.api().PointerGetAttribute(&ordinal, kDeviceOrdinal, memory.address() + 99) == 0);
  CHECK(ordinal == 1);
  const auto of_host = reinterpret_cast<std::uintptr_t>(pinned.data());
  CHECK(bench.api().PointerGetAttribute(&type, kMemoryType, of_host) == 0);
  CHECK(type == kHostMemory);
  CHECK(bench.api().PointerGetAttribute(&type, kMemoryType, memory.address() + 100) != 0);
}

TEST_CASE("threads open memory as processes do, and keep it") {
  Bench bench;
  const Stream stream(*bench.context);
  auto memory = std::make_unique<DeviceMemory>(*bench.context, 100);
  CUipcMemHandle handle;
  CUdeviceptr opened = 0;
  CHECK(bench.api().IpcGetMemHandle(&handle, memory->address() + 50) == 0);
  CHECK(bench.api().IpcOpenMemHandle(&opened, handle, kIpcLazyPeerAccess) == 0);
  CHECK(opened == memory->address());
  memory.reset();
  CHECK(bench.gpu.bytes_used(0) == 0);
  CHECK(bench.api().MemsetD8Async(opened, 1, 100, stream.handle()) == 0);
  stream.synchronize();
  CHECK(bench.api().IpcCloseMemHandle(opened) == 0);
  CHECK(bench.misuse.empty());
  CHECK(bench.api().IpcCloseMemHandle(opened) != 0);
  CHECK(bench.said("not known"));
}

TEST_CASE("misuse is told") {
  Bench bench({.devices = 2, .wait_timeout = std::chrono::seconds(0)});
  CUdeviceptr pool = 0;
  CHECK(bench.api().MemAllocAsync(&pool, 100, nullptr) == 0);
  CHECK(bench.api().StreamSynchronize(nullptr) == 0);
  bench.misuse.clear();

  bench.gpu.pause();
  CHECK(bench.api().MemsetD8Async(pool, 0, 101, nullptr) != 0);
  CHECK(bench.said("beyond the memory's end"));
  CHECK(bench.api().MemsetD8Async(pool, 0, 100, nullptr) == 0);
  CHECK(bench.api().StreamSynchronize(nullptr) != 0);
  CHECK(bench.said("has done"));
  CHECK(bench.api().MemFree(pool) != 0);
  CHECK(bench.said("still uses"));
  bench.gpu.resume();
  CHECK(bench.api().MemFree(pool) != 0);
  CHECK(bench.said("not known"));

  const Event event(*bench.context);
  CHECK(bench.api().EventDestroy(event.handle()) == 0);
  CHECK(bench.api().EventRecord(event.handle(), nullptr) != 0);
  CHECK(bench.said("an event that is not known"));
  const Context second(bench.api(), 1);
  const Stream elsewhere(second);
  const Event here(*bench.context);
  CHECK(bench.api().EventRecord(here.handle(), elsewhere.handle()) != 0);
  CHECK(bench.said("not of one device"));
  bench.current.reset();
  CUevent made = nullptr;
  CHECK(bench.api().EventCreate(&made, kEventDisableTiming) != 0);
  CHECK(bench.said("cuEventCreate without a context"));
}

TEST_CASE("calls fail when they are told to, and all of them when the GPU falls off") {
  Bench bench;
  bench.gpu.fail("cuMemAlloc", kOutOfMemory);
  CHECK_THROWS_WITH(DeviceMemory(*bench.context, 8),
                    "cuMemAlloc of 8 bytes: CUDA_ERROR_OUT_OF_MEMORY (simulated)");
  bench.gpu.fail("cuMemAlloc", kSuccess);
  CHECK_NOTHROW(DeviceMemory(*bench.context, 8));

  const Stream stream(*bench.context);
  const Event event(*bench.context);
  bench.gpu.pause();
  event.record(stream.handle());
  std::thread waits([&] { CHECK_THROWS_AS(stream.synchronize(), Error); });
  bench.gpu.lose_device();
  waits.join();
  CHECK_THROWS_AS(event.done(), Error);
  CHECK(bench.misuse.empty());
}

TEST_CASE("everything is given back") {
  SimulatedGpu gpu;
  REQUIRE(start_driver(gpu.api()) == "");
  {
    const Context context(gpu.api(), 0);
    Launcher launcher(context, SimulatedGpu::code);
    const DeviceMemory a(context, 64), b(context, 64);
    launcher.move(DType::kFloat32, DType::kFloat32, {},
                  std::vector<Transfer>{{a.address(), b.address(), 16}});
    CHECK(gpu.alive() > 5);
  }
  CHECK(gpu.alive() == 0);
  CHECK(gpu.pushed() == 0);
}

}  // namespace
