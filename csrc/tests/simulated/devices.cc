// Driver functions: devices and contexts.
#include <cstdio>

#include "tests/simulated/functions.h"

namespace horoplug::testing::simulated {

using namespace horoplug::cuda;

namespace {

bool is_device(CUdevice device) { return device >= 0 && device < machine().options.devices; }

}  // namespace

CUresult Functions::DeviceGetCount(int* count) {
  *count = machine().options.devices;
  return kSuccess;
}

CUresult Functions::DeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return is_device(ordinal) ? kSuccess : kInvalidDevice;
}

CUresult Functions::DeviceGetName(char* name, int size, CUdevice device) {
  std::snprintf(name, static_cast<std::size_t>(size), "Simulated GPU");
  return is_device(device) ? kSuccess : kInvalidDevice;
}

CUresult Functions::DeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice device) {
  const SimulatedOptions& options = machine().options;
  *value = which == kMultiprocessorCount      ? 2
           : which == kComputeCapabilityMajor ? options.capability / 10
           : which == kComputeCapabilityMinor ? options.capability % 10
           : which == kMemoryPoolsSupported   ? 1
           : which == kIpcEventSupported      ? static_cast<int>(options.ipc_events)
                                              : 0;
  return is_device(device) ? kSuccess : kInvalidDevice;
}

CUresult Functions::DeviceTotalMem(std::size_t* bytes, CUdevice device) {
  *bytes = machine().options.memory;
  return is_device(device) ? kSuccess : kInvalidDevice;
}

CUresult Functions::DeviceGetUuid(CUuuid* uuid, CUdevice device) {
  *uuid = {"simulated GPU "};
  uuid->bytes[15] = static_cast<char>(machine().options.one_gpu ? '0' : '0' + device);
  return is_device(device) ? kSuccess : kInvalidDevice;
}

CUresult Functions::DevicePrimaryCtxRetain(CUcontext* context, CUdevice ordinal) {
  if (!is_device(ordinal)) return kInvalidDevice;
  Device& device = machine().devices[static_cast<std::size_t>(ordinal)];
  ++device.retained;
  *context = reinterpret_cast<CUcontext>(&device);
  return kSuccess;
}

CUresult Functions::DevicePrimaryCtxRelease(CUdevice ordinal) {
  if (!is_device(ordinal)) return kInvalidDevice;
  if (machine().devices[static_cast<std::size_t>(ordinal)].retained-- > 0) return kSuccess;
  return machine().misuse("a primary context is released more often than retained",
                          kInvalidContext);
}

CUresult Functions::CtxPushCurrent(CUcontext context) {
  auto* const device = reinterpret_cast<Device*>(context);
  if (device < machine().devices.begin() || device >= machine().devices.end() ||
      device->retained.load() <= 0) {
    return machine().misuse("a context that is not retained is made current", kInvalidContext);
  }
  machine().contexts().push_back(device);
  ++machine().pushed;
  return kSuccess;
}

CUresult Functions::CtxPopCurrent(CUcontext* context) {
  std::vector<Device*>& stack = machine().contexts();
  if (stack.empty()) return kInvalidContext;
  if (context != nullptr) *context = reinterpret_cast<CUcontext>(stack.back());
  stack.pop_back();
  --machine().pushed;
  return kSuccess;
}

CUresult Functions::CtxGetDevice(CUdevice* device) {
  if (machine().current() == nullptr) return kInvalidContext;
  *device = machine().current()->ordinal;
  return kSuccess;
}

}  // namespace horoplug::testing::simulated
