#include "device/cuda/driver/driver.h"

#include "base/status.h"

namespace horoplug::cuda {
namespace {

std::string inspect_driver(void* library, Driver& driver) {
  DriverApi& api = driver.api;
  // The version first: an old driver lacks functions because it is old.
  if (!find_function(library, "cuDriverGetVersion", api.DriverGetVersion)) {
    return "has no cuDriverGetVersion";
  }
  if (const CUresult result = api.DriverGetVersion(&driver.version); result != kSuccess) {
    return "cuDriverGetVersion fails with " + std::to_string(result);
  }
  if (driver.version < kOldestDriver) {
    return "the driver is for CUDA " + cuda_version(driver.version) +
           ", which is too old: " + cuda_version(kOldestDriver) + " (driver 525) is needed";
  }
#define HOROPLUG_CUDA_FIND(name, symbol, parameters) \
  if (!find_function(library, #symbol, api.name)) return "has no " #symbol;
  HOROPLUG_CUDA_FUNCTIONS(HOROPLUG_CUDA_FIND)
#undef HOROPLUG_CUDA_FIND
  return {};
}

}  // namespace

Driver open_driver(const LibraryPaths& places) {
  return open_library<Driver>({"libcuda.so.1"}, places, inspect_driver);
}

std::string start_driver(const DriverApi& api) {
  const CUresult result = api.Init(0);
  return result == kSuccess ? "" : "cuInit: " + describe(api, result);
}

std::string describe(const DriverApi& api, CUresult result) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (api.GetErrorName(result, &name) != kSuccess || name == nullptr) {
    return "CUDA error " + std::to_string(result);
  }
  const bool explained = api.GetErrorString(result, &text) == kSuccess && text != nullptr;
  return explained ? std::string(name) + " (" + text + ")" : name;
}

void check(const DriverApi& api, CUresult result, std::string_view call) {
  if (result == kSuccess) return;
  throw Error(HP_ABORTED, std::string(call) + ": " + describe(api, result));
}

DeviceProperties device_properties(const DriverApi& api, int ordinal) {
  CUdevice device = 0;
  check(api, api.DeviceGet(&device, ordinal), "cuDeviceGet");
  char name[256] = "";
  check(api, api.DeviceGetName(name, sizeof name - 1, device), "cuDeviceGetName");
  DeviceProperties properties;
  properties.name = name;
  const auto attribute = [&](CUdevice_attribute which) {
    int value = 0;
    check(api, api.DeviceGetAttribute(&value, which, device), "cuDeviceGetAttribute");
    return value;
  };
  properties.major = attribute(kComputeCapabilityMajor);
  properties.minor = attribute(kComputeCapabilityMinor);
  properties.multiprocessors = attribute(kMultiprocessorCount);
  check(api, api.DeviceTotalMem(&properties.memory, device), "cuDeviceTotalMem");
  return properties;
}

}  // namespace horoplug::cuda
