#include "device/cuda/driver/nvrtc.h"

#include <algorithm>

namespace horoplug::cuda {
namespace {

std::string inspect_nvrtc(void* library, int driver_version, Nvrtc& nvrtc) {
  NvrtcApi& api = nvrtc.api;
  if (!find_function(library, "nvrtcVersion", api.Version)) return "has no nvrtcVersion";
  int major = 0, minor = 0;
  if (const nvrtcResult result = api.Version(&major, &minor); result != kNvrtcSuccess) {
    return "nvrtcVersion fails with " + std::to_string(result);
  }
  nvrtc.version = 1000 * major + 10 * minor;
  if (nvrtc.version < kOldestNvrtc) {
    return "version " + cuda_version(nvrtc.version) + " is too old: " + cuda_version(kOldestNvrtc) +
           " is needed";
  }
  if (driver_version != 0 && major > driver_version / 1000) {
    return "version " + cuda_version(nvrtc.version) + " is too new for the driver, which is for " +
           "CUDA " + cuda_version(driver_version);
  }
#define HOROPLUG_NVRTC_FIND(name, parameters) \
  if (!find_function(library, "nvrtc" #name, api.name)) return "has no nvrtc" #name;
  HOROPLUG_NVRTC_FUNCTIONS(HOROPLUG_NVRTC_FIND)
#undef HOROPLUG_NVRTC_FIND
  int count = 0;
  if (api.GetNumSupportedArchs(&count) != kNvrtcSuccess || count <= 0 || count > 1000) {
    return "does not say what it compiles for";
  }
  nvrtc.archs.assign(static_cast<std::size_t>(count), 0);
  if (api.GetSupportedArchs(nvrtc.archs.data()) != kNvrtcSuccess) {
    return "does not say what it compiles for";
  }
  std::sort(nvrtc.archs.begin(), nvrtc.archs.end());
  return {};
}

}  // namespace

Nvrtc open_nvrtc(const LibraryPaths& places, int driver_version) {
  return open_library<Nvrtc>({"libnvrtc.so.13", "libnvrtc.so.12"}, places,
                             [driver_version](void* library, Nvrtc& nvrtc) {
                               return inspect_nvrtc(library, driver_version, nvrtc);
                             });
}

}  // namespace horoplug::cuda
