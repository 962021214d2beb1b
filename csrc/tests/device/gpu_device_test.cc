// Runs the checks of device_checks.h on a simulated GPU and, if the machine has one, on a real GPU.
// With HOROPLUG_TEST_GPU=1 (make test-gpu), a missing GPU is a failure. HOROPLUG_TEST_KERNELS is a
// file of kernels that is used instead of NVRTC.
#include <doctest/doctest.h>

#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "device/cuda/driver/driver.h"
#include "device/cuda/driver/nvrtc.h"
#include "device/cuda/jit/kernel_code.h"
#include "device/cuda/runtime/launcher.h"
#include "tests/harness/device_checks.h"
#include "tests/harness/random_elements.h"
#include "tests/simulated/simulated_gpu.h"

namespace {

using namespace horoplug;
using namespace horoplug::cuda;
using namespace horoplug::testing;

void check_all(const DriverApi& api, const ImageSource& images) {
  std::mt19937_64 random(seed());
  CAPTURE(seed());
  const Context context(api, 0);
  Launcher launcher(context, images);
  check_moves(context, launcher, random);
  check_reductions(context, launcher, random);
  check_adasum(context, launcher, random);
}

TEST_CASE("all kernels give the CPU's results on a simulated GPU") {
  SimulatedGpu gpu;
  REQUIRE(start_driver(gpu.api()) == "");
  check_all(gpu.api(), SimulatedGpu::code);
  CHECK(gpu.alive() == 0);
}

TEST_CASE("all kernels give the CPU's results on a real GPU") {
  const bool required = std::getenv("HOROPLUG_TEST_GPU") != nullptr;
  const auto missing = [&](const std::string& why) {
    MESSAGE("not run: ", why);
    CHECK_FALSE(required);
  };
  const Driver driver = open_driver();
  if (!driver.ok()) return missing(driver.problem);
  if (const std::string problem = start_driver(driver.api); !problem.empty()) {
    return missing(problem);
  }
  if (const char* const kernels = std::getenv("HOROPLUG_TEST_KERNELS")) {
    Nvrtc none;
    none.problem = "not to be used";
    return check_all(driver.api,
                     kernel_code(none, {{kernels}, false}, driver.version, KernelCache({})));
  }
  const char* const path = std::getenv("HOROPLUG_TEST_NVRTC");
  const Nvrtc nvrtc = open_nvrtc({{path != nullptr ? path : ""}, true}, driver.version);
  if (!nvrtc.ok()) return missing(nvrtc.problem);
  const KernelCache cache(KernelCache::default_folder());
  check_all(driver.api, kernel_code(nvrtc, {}, driver.version, cache));
}

}  // namespace
