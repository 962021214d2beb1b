#include "tests/harness/recorded_driver.h"

#include <bit>
#include <cstring>
#include <utility>

namespace horoplug::testing {

using namespace horoplug::cuda;

namespace {

thread_local RecordedDriver* recorder = nullptr;

template <typename Handle>
std::string number(Handle handle) {
  return std::to_string(std::bit_cast<std::uintptr_t>(handle));
}

}  // namespace

// Implements the functions of DriverApi.
struct Recorded {
  static CUresult result(const char* function) {
    const auto found = recorder->failures_.find(function);
    return found == recorder->failures_.end() ? kSuccess : found->second;
  }
  static void note(std::string call) { recorder->calls_.push_back(std::move(call)); }

  template <typename Handle>
  static CUresult make(const char* function, const char* kind, Handle* handle) {
    if (const CUresult failure = result(function); failure != kSuccess) return failure;
    *handle = std::bit_cast<Handle>(++recorder->handles_);
    recorder->alive_.insert(kind + number(*handle));
    return kSuccess;
  }
  template <typename Handle>
  static CUresult end(const char* kind, Handle handle) {
    // Destroying a handle twice is an error of the code under test.
    return recorder->alive_.erase(kind + number(handle)) == 1 ? kSuccess : 400;
  }

  static void fill(DriverApi& api);
};

void Recorded::fill(DriverApi& api) {
  api.GetErrorName = [](CUresult, const char** text) -> CUresult {
    *text = "CUDA_ERROR_RECORDED";
    return kSuccess;
  };
  api.GetErrorString = [](CUresult, const char**) -> CUresult { return 1; };
  api.DeviceGet = [](CUdevice* device, int ordinal) -> CUresult {
    *device = ordinal;
    return result("cuDeviceGet");
  };
  api.DeviceGetName = [](char* name, int, CUdevice) -> CUresult {
    std::strcpy(name, "Recorder");
    return kSuccess;
  };
  api.DeviceGetAttribute = [](int* value, CUdevice_attribute which, CUdevice) -> CUresult {
    *value = which == kMultiprocessorCount ? 2 : which == kComputeCapabilityMajor ? 9 : 0;
    return kSuccess;
  };
  api.DeviceTotalMem = [](std::size_t* bytes, CUdevice) -> CUresult {
    *bytes = 1 << 30;
    return kSuccess;
  };
  api.DevicePrimaryCtxRetain = [](CUcontext* context, CUdevice device) -> CUresult {
    *context = std::bit_cast<CUcontext>(std::uintptr_t{1000} + static_cast<unsigned>(device));
    recorder->alive_.insert("context");
    return result("cuDevicePrimaryCtxRetain");
  };
  api.DevicePrimaryCtxRelease = [](CUdevice) -> CUresult {
    recorder->alive_.erase("context");
    return kSuccess;
  };
  api.CtxPushCurrent = [](CUcontext) -> CUresult {
    const CUresult failure = result("cuCtxPushCurrent");
    if (failure == kSuccess) ++recorder->pushed_;
    return failure;
  };
  api.CtxPopCurrent = [](CUcontext*) -> CUresult {
    --recorder->pushed_;
    return kSuccess;
  };
  api.ModuleLoadDataEx = [](CUmodule* module, const void* image, unsigned, CUjit_option*,
                            void**) -> CUresult {
    const CUresult failure = make("cuModuleLoadDataEx", "module", module);
    note("load " + std::string(static_cast<const char*>(image)));
    return failure;
  };
  api.ModuleUnload = [](CUmodule module) -> CUresult { return end("module", module); };
  api.ModuleGetFunction = [](CUfunction* function, CUmodule, const char* name) -> CUresult {
    *function = std::bit_cast<CUfunction>(++recorder->handles_);
    recorder->functions_[recorder->handles_] = name;
    return result("cuModuleGetFunction");
  };
  api.LaunchKernel = [](CUfunction function, unsigned grid, unsigned, unsigned, unsigned, unsigned,
                        unsigned, unsigned, CUstream stream, void** parameters,
                        void**) -> CUresult {
    const std::string& name = recorder->functions_.at(std::bit_cast<std::size_t>(function));
    note("launch " + name + " <<<" + std::to_string(grid) + ">>> stream " + number(stream));
    if (recorder->on_launch) recorder->on_launch(name, grid, parameters[0]);
    return result("cuLaunchKernel");
  };
  api.StreamCreateWithPriority = [](CUstream* stream, unsigned flags, int) -> CUresult {
    if (flags != kStreamNonBlocking) return 1;
    return make("cuStreamCreateWithPriority", "stream", stream);
  };
  api.StreamDestroy = [](CUstream stream) -> CUresult { return end("stream", stream); };
  api.StreamWaitEvent = [](CUstream stream, CUevent event, unsigned) -> CUresult {
    note("stream " + number(stream) + " waits for event " + number(event));
    return result("cuStreamWaitEvent");
  };
  api.StreamSynchronize = [](CUstream stream) -> CUresult {
    note("host waits for stream " + number(stream));
    return result("cuStreamSynchronize");
  };
  api.EventCreate = [](CUevent* event, unsigned flags) -> CUresult {
    if (flags != kEventDisableTiming) return 1;
    return make("cuEventCreate", "event", event);
  };
  api.EventDestroy = [](CUevent event) -> CUresult { return end("event", event); };
  api.EventRecord = [](CUevent event, CUstream stream) -> CUresult {
    note("event " + number(event) + " in stream " + number(stream));
    return result("cuEventRecord");
  };
  api.EventQuery = [](CUevent) -> CUresult {
    const CUresult failure = result("cuEventQuery");
    return failure == kSuccess && !recorder->events_done_ ? kNotReady : failure;
  };
  api.MemAllocAsync = [](CUdeviceptr* address, std::size_t bytes, CUstream) -> CUresult {
    if (const CUresult failure = result("cuMemAllocAsync"); failure != kSuccess) return failure;
    auto memory = std::make_unique<std::byte[]>(bytes);
    *address = std::bit_cast<std::uintptr_t>(memory.get());
    recorder->alive_.insert("memory" + std::to_string(*address));
    recorder->memory_[*address] = std::move(memory);
    return kSuccess;
  };
  api.MemFreeAsync = [](CUdeviceptr address, CUstream) -> CUresult {
    recorder->memory_.erase(address);
    return end("memory", address);
  };
  api.MemHostAlloc = [](void** data, std::size_t bytes, unsigned) -> CUresult {
    if (const CUresult failure = result("cuMemHostAlloc"); failure != kSuccess) return failure;
    *data = new std::byte[bytes];
    recorder->alive_.insert("pinned" + number(*data));
    return kSuccess;
  };
  api.MemFreeHost = [](void* data) -> CUresult {
    const CUresult ended = end("pinned", data);
    if (ended == kSuccess) delete[] static_cast<std::byte*>(data);
    return ended;
  };
  api.MemcpyHtoDAsync = [](CUdeviceptr to, const void* from, std::size_t bytes,
                           CUstream stream) -> CUresult {
    note("copy in stream " + number(stream));
    std::memcpy(std::bit_cast<void*>(static_cast<std::uintptr_t>(to)), from, bytes);
    return result("cuMemcpyHtoDAsync");
  };
  api.MemcpyDtoHAsync = [](void* to, CUdeviceptr from, std::size_t bytes, CUstream) -> CUresult {
    std::memcpy(to, std::bit_cast<const void*>(static_cast<std::uintptr_t>(from)), bytes);
    return result("cuMemcpyDtoHAsync");
  };
}

RecordedDriver::RecordedDriver() {
  recorder = this;
  Recorded::fill(api_);
}
RecordedDriver::~RecordedDriver() { recorder = nullptr; }

std::vector<std::string> RecordedDriver::take_calls() { return std::exchange(calls_, {}); }

}  // namespace horoplug::testing
