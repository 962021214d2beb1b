#include "device/cuda/driver/capabilities.h"

#include "base/status.h"
#include "device/cuda/driver/driver.h"
#include "device/cuda/driver/nccl.h"
#include "device/cuda/driver/nvrtc.h"
#include "device/cuda/jit/kernel_code.h"

namespace horoplug::cuda {
namespace {

std::string yes(const std::string& what, const std::string& path) {
  return "[X] " + what + " (" + path + ")";
}
std::string no(const std::string& what, const std::string& why) {
  return "[ ] " + what + ": " + why;
}

std::string describe(const DeviceProperties& device) {
  return device.name + " (sm_" + std::to_string(10 * device.major + device.minor) + ", " +
         std::to_string(device.memory >> 30) + " GiB)";
}

std::string devices(const DriverApi& api) {
  int count = 0;
  check(api, api.DeviceGetCount(&count), "cuDeviceGetCount");
  std::string text;
  for (int i = 0; i < count; ++i)
    text += (i == 0 ? "" : ", ") + describe(device_properties(api, i));
  return count == 0 ? "no device" : text;
}

std::string driver_fact(const Driver& driver) {
  const std::string what = "CUDA driver";
  if (!driver.ok()) return no(what, driver.problem);
  const std::string named = what + " " + cuda_version(driver.version);
  if (const std::string problem = start_driver(driver.api); !problem.empty()) {
    return no(named, driver.path + ": " + problem);
  }
  try {
    return yes(named + ": " + devices(driver.api), driver.path);
  } catch (const Error& error) {
    return no(named, driver.path + ": " + error.what());
  }
}

// Of the first device; 0 if there is none.
int capability(const Driver& driver) {
  if (!driver.ok() || !start_driver(driver.api).empty()) return 0;
  try {
    const DeviceProperties device = device_properties(driver.api, 0);
    return 10 * device.major + device.minor;
  } catch (const Error&) {
    return 0;
  }
}

std::string kernels_capability(const LibraryPaths& places, const Driver& driver,
                               const Nvrtc& nvrtc) {
  const int device = capability(driver);
  if (!needs_file(nvrtc, device)) return yes("Kernels of NVRTC", "compiled when first used");
  const KernelFile file = open_kernel_file(places, driver.ok() ? driver.version : 0);
  const bool fits = file.ok() && (device == 0 || file.fits(device));
  return fits ? yes("Kernels of " + file.describe(), file.path)
              : no("Kernels", no_code(nvrtc, file, device));
}

}  // namespace

std::vector<std::string> gpu_capabilities(const LibraryPaths& places) {
  const Driver driver = open_driver(places);
  const Nvrtc nvrtc = open_nvrtc(places, driver.ok() ? driver.version : 0);
  const Nccl nccl = open_nccl(places);
  return {
      driver_fact(driver),
      nvrtc.ok() ? yes("NVRTC " + cuda_version(nvrtc.version), nvrtc.path)
                 : no("NVRTC", nvrtc.problem),
      nccl.ok() ? yes("NCCL " + nccl_version(nccl.version), nccl.path) : no("NCCL", nccl.problem),
      kernels_capability(places, driver, nvrtc)};
}

}  // namespace horoplug::cuda
