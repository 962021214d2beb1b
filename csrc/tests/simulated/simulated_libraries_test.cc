// Opens the simulated libraries as horoplug does, and runs a kernel from its source to its result.
#include <doctest/doctest.h>

#include <filesystem>
#include <vector>

#include "device/cuda/driver/driver.h"
#include "device/cuda/driver/nccl.h"
#include "device/cuda/driver/nvrtc.h"
#include "device/cuda/jit/kernel_code.h"
#include "device/cuda/runtime/launcher.h"
#include "tests/harness/stubs.h"

namespace {

using namespace horoplug;
using namespace horoplug::cuda;
using horoplug::testing::stub;

TEST_CASE("the simulated libraries compile, load and launch a kernel") {
  const auto library = [](const char* file) {
    return LibraryPaths{{stub("simulated", file)}, /*elsewhere=*/false};
  };
  // Sanitizer builds have no simulated libraries: see stubs/CMakeLists.txt.
  if (!std::filesystem::exists(stub("simulated", "libcuda.so.1"))) return;
  const Driver driver = open_driver(library("libcuda.so.1"));
  REQUIRE(driver.problem == "");
  REQUIRE(start_driver(driver.api) == "");
  const Nvrtc nvrtc = open_nvrtc(library("libnvrtc.so.12"), driver.version);
  REQUIRE(nvrtc.problem == "");
  CHECK(open_nccl(library("libnccl.so.2")).problem == "");

  const Context context(driver.api, 0);
  Launcher launcher(context, kernel_code(nvrtc, {}, driver.version, KernelCache({})));
  const DeviceMemory from(context, 400), to(context, 400);
  std::vector<float> values(100, 3);
  const Current current(context);
  const CUstream stream = launcher.stream().handle();
  CHECK(driver.api.MemcpyHtoDAsync(from.address(), values.data(), 400, stream) == kSuccess);
  launcher.move(DType::kFloat32, DType::kFloat32, {2, 1},
                std::vector<Transfer>{{from.address(), to.address(), 100}});
  CHECK(driver.api.MemcpyDtoHAsync(values.data(), to.address(), 400, stream) == kSuccess);
  CHECK(values == std::vector<float>(100, 6));
}

}  // namespace
