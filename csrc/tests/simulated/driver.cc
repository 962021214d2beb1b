// The driver's functions, over the machine of the process.
#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>
#include <string>

#include "device/cuda/kernels/tables.h"
#include "tests/host_grid.h"
#include "tests/simulated/machine.h"

namespace horoplug::testing::simulated {

using namespace horoplug::cuda;

namespace {

constexpr std::string_view kImage = "simulated kernel: ";

Machine& machine() { return Machine::get(); }

void* host(CUdeviceptr address) {
  return std::bit_cast<void*>(static_cast<std::uintptr_t>(address));
}

CUresult unknown(const char* what) {
  return machine().misuse(std::string(what) + " that is not known, or has been given back",
                          kInvalidHandle);
}

bool is_device(CUdevice device) { return device >= 0 && device < machine().options.devices; }

template <typename T>
CUresult give(void* to, T value) {
  std::memcpy(to, &value, sizeof value);
  return kSuccess;
}

// A copy of memory that is within a card's reach.
CUresult copy(const char* what, CUdeviceptr to, CUdeviceptr from, std::size_t bytes,
              CUstream handle) {
  Stream* const stream = machine().stream(handle);
  if (stream == nullptr) return unknown("a stream");
  if (bytes == 0) return kSuccess;
  Allocation* const target = machine().reachable(what, to, bytes);
  Allocation* const source = machine().reachable(what, from, bytes);
  if (target == nullptr || source == nullptr) return kInvalidValue;
  machine().put(*stream, what,
                [to, from, bytes](Stream::Random&) { std::memmove(host(to), host(from), bytes); },
                {target, source});
  return kSuccess;
}

bool is_pinned(const void* data, std::size_t bytes) {
  const auto address = std::bit_cast<std::uintptr_t>(data);
  const Allocation* const found = machine().memory.find(address);
  return found != nullptr && found->kind == MemoryKind::kPinned && found->holds(address, bytes);
}

CUresult in_use(const Allocation& memory, const char* call) {
  char text[200];
  std::snprintf(text, sizeof text, "%s of %zu bytes at %p, which a stream still uses", call,
                memory.bytes, static_cast<void*>(memory.data));
  return machine().misuse(text);
}

CUresult allocate(MemoryKind kind, int device, std::size_t bytes, CUdeviceptr* address) {
  if (bytes == 0) return kInvalidValue;
  const Allocation* const made = machine().memory.allocate(kind, device, bytes);
  if (made == nullptr) return kOutOfMemory;
  *address = std::bit_cast<std::uintptr_t>(made->data);
  return kSuccess;
}

// The functions under the names of the table. What is common to all, Guarded has done.
struct Functions {
  static CUresult Init(unsigned) {
    machine().started.store(true);
    return kSuccess;
  }
  static CUresult DriverGetVersion(int* version) {
    *version = machine().options.driver_version;
    return kSuccess;
  }
  static CUresult GetErrorName(CUresult result, const char** text);
  static CUresult GetErrorString(CUresult, const char** text) {
    *text = "simulated";
    return kSuccess;
  }

  // --- devices and contexts

  static CUresult DeviceGetCount(int* count) {
    *count = machine().options.devices;
    return kSuccess;
  }
  static CUresult DeviceGet(CUdevice* device, int ordinal) {
    *device = ordinal;
    return is_device(ordinal) ? kSuccess : kInvalidDevice;
  }
  static CUresult DeviceGetName(char* name, int size, CUdevice device) {
    std::snprintf(name, static_cast<std::size_t>(size), "Simulated card");
    return is_device(device) ? kSuccess : kInvalidDevice;
  }
  static CUresult DeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice device) {
    const SimulatedOptions& options = machine().options;
    *value = which == kMultiprocessorCount      ? 2
             : which == kComputeCapabilityMajor ? options.capability / 10
             : which == kComputeCapabilityMinor ? options.capability % 10
             : which == kMemoryPoolsSupported   ? 1
             : which == kIpcEventSupported      ? static_cast<int>(options.ipc_events)
                                                : 0;
    return is_device(device) ? kSuccess : kInvalidDevice;
  }
  static CUresult DeviceTotalMem(std::size_t* bytes, CUdevice device) {
    *bytes = machine().options.memory;
    return is_device(device) ? kSuccess : kInvalidDevice;
  }
  static CUresult DeviceGetUuid(CUuuid* uuid, CUdevice device) {
    *uuid = {"simulated card "};
    uuid->bytes[15] = static_cast<char>(machine().options.one_card ? '0' : '0' + device);
    return is_device(device) ? kSuccess : kInvalidDevice;
  }
  static CUresult DeviceGetPCIBusId(char* text, int size, CUdevice device) {
    std::snprintf(text, static_cast<std::size_t>(size), "0000:%02x:00.0",
                  machine().options.one_card ? 1 : device + 1);
    return is_device(device) ? kSuccess : kInvalidDevice;
  }
  static CUresult DeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
    *can = machine().options.peer_access && device != peer;
    return is_device(device) && is_device(peer) ? kSuccess : kInvalidDevice;
  }
  static CUresult DevicePrimaryCtxRetain(CUcontext* context, CUdevice ordinal) {
    if (!is_device(ordinal)) return kInvalidDevice;
    Device& device = machine().devices[static_cast<std::size_t>(ordinal)];
    ++device.retained;
    *context = std::bit_cast<CUcontext>(&device);
    return kSuccess;
  }
  static CUresult DevicePrimaryCtxRelease(CUdevice ordinal) {
    if (!is_device(ordinal)) return kInvalidDevice;
    if (machine().devices[static_cast<std::size_t>(ordinal)].retained-- > 0) return kSuccess;
    return machine().misuse("a primary context is released more often than retained",
                            kInvalidContext);
  }
  static CUresult CtxPushCurrent(CUcontext context) {
    auto* const device = std::bit_cast<Device*>(context);
    if (device < machine().devices.begin() || device >= machine().devices.end() ||
        device->retained.load() <= 0) {
      return machine().misuse("a context that is not retained is made current", kInvalidContext);
    }
    machine().contexts().push_back(device);
    ++machine().pushed;
    return kSuccess;
  }
  static CUresult CtxPopCurrent(CUcontext* context) {
    std::vector<Device*>& stack = machine().contexts();
    if (stack.empty()) return kInvalidContext;
    if (context != nullptr) *context = std::bit_cast<CUcontext>(stack.back());
    stack.pop_back();
    --machine().pushed;
    return kSuccess;
  }
  static CUresult CtxGetDevice(CUdevice* device) {
    if (machine().current() == nullptr) return kInvalidContext;
    *device = machine().current()->ordinal;
    return kSuccess;
  }

  // --- kernels

  static CUresult ModuleLoadDataEx(CUmodule* made, const void* image, unsigned, CUjit_option*,
                                   void**) {
    const auto* const text = static_cast<const char*>(image);
    if (std::strncmp(text, kImage.data(), kImage.size()) != 0) return kInvalidImage;
    *made = std::bit_cast<CUmodule>(
        machine().make_module(machine().current()->ordinal, text + kImage.size()));
    return kSuccess;
  }
  static CUresult ModuleUnload(CUmodule handle) {
    return machine().end(handle) ? kSuccess : unknown("a module");
  }
  static CUresult ModuleGetFunction(CUfunction* function, CUmodule handle, const char* name) {
    const Module* const module = machine().module(handle);
    if (module == nullptr) return unknown("a module");
    if (module->kernel != name || args_bytes(name) == 0) return kNotFound;
    *function = std::bit_cast<CUfunction>(module);
    return kSuccess;
  }
  static CUresult LaunchKernel(CUfunction handle, unsigned grid, unsigned grid_y, unsigned grid_z,
                               unsigned block, unsigned block_y, unsigned block_z, unsigned,
                               CUstream stream_handle, void** parameters, void**) {
    const Module* const module = machine().module(handle);
    if (module == nullptr) return unknown("a kernel");
    Stream* const stream = machine().stream(stream_handle);
    if (stream == nullptr) return unknown("a stream");
    if (stream->device != module->device || stream->device != machine().current()->ordinal) {
      return machine().misuse("kernel, stream and context are not of one device", kInvalidHandle);
    }
    if (grid == 0 || grid_y != 1 || grid_z != 1 || block != kThreads || block_y != 1 ||
        block_z != 1) {
      return kInvalidValue;
    }
    const auto* const first = static_cast<const std::byte*>(parameters[0]);
    const std::vector<std::byte> args(first, first + args_bytes(module->kernel));
    machine().put(
        *stream, module->kernel.c_str(),
        [module, args, grid](Stream::Random& random) {
          run_on_host(module->kernel, args.data(), grid, random, /*threads=*/1);
        },
        machine().mentioned(args));
    return kSuccess;
  }

  // --- streams and events

  static CUresult StreamCreateWithPriority(CUstream* made, unsigned flags, int) {
    if (flags > kStreamNonBlocking) return kInvalidValue;
    *made = std::bit_cast<CUstream>(machine().make_stream(machine().current()->ordinal, flags));
    return kSuccess;
  }
  static CUresult StreamDestroy(CUstream handle) {
    if (!machine().end(handle)) return unknown("a stream");
    std::bit_cast<Stream*>(handle)->end();
    return kSuccess;
  }
  static CUresult StreamWaitEvent(CUstream stream_handle, CUevent event_handle, unsigned) {
    Stream* const stream = machine().stream(stream_handle);
    if (stream == nullptr) return unknown("a stream");
    const Event* const event = machine().event(event_handle);
    if (event == nullptr) return unknown("an event");
    const std::uint32_t record = event->state->recorded.load(std::memory_order_relaxed);
    if (record == 0) return kSuccess;
    machine().put(*stream, "wait for an event",
                  [state = event->state, record](Stream::Random&) {
                    wait_for(state->slot(record), record, [] {
                      return machine().streams_state.stopped.load(std::memory_order_relaxed);
                    });
                  },
                  {});
    return kSuccess;
  }
  static CUresult StreamSynchronize(CUstream handle) {
    Stream* const stream = machine().stream(handle);
    if (stream == nullptr) return unknown("a stream");
    ++machine().host_waits;
    return machine().wait_for_stream("cuStreamSynchronize", *stream);
  }
  static CUresult StreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
    const Stream* const stream = machine().stream(handle);
    if (stream == nullptr) return unknown("a stream");
    *status = stream->capture_status.load();
    return kSuccess;
  }
  static CUresult LaunchHostFunc(CUstream handle, CUhostFn function, void* data) {
    Stream* const stream = machine().stream(handle);
    if (stream == nullptr) return unknown("a stream");
    machine().put(*stream, "host function", [function, data](Stream::Random&) { function(data); },
                  {});
    return kSuccess;
  }
  static CUresult EventCreate(CUevent* made, unsigned flags) {
    const bool shared = (flags & kEventInterprocess) != 0;
    if (shared && ((flags & kEventDisableTiming) == 0 || !machine().options.ipc_events)) {
      return kInvalidValue;
    }
    *made = std::bit_cast<CUevent>(machine().make_event(machine().current()->ordinal, flags));
    return kSuccess;
  }
  static CUresult EventDestroy(CUevent handle) {
    const Event* const event = machine().event(handle);
    if (event == nullptr) return unknown("an event");
    machine().end(handle);
    if (!event->name.empty() && !event->imported) machine().blocks.remove(event->name);
    return kSuccess;
  }
  static CUresult EventRecord(CUevent event_handle, CUstream stream_handle) {
    const Event* const event = machine().event(event_handle);
    if (event == nullptr) return unknown("an event");
    Stream* const stream = machine().stream(stream_handle);
    if (stream == nullptr) return unknown("a stream");
    if (event->device != stream->device) {
      return machine().misuse("an event and its stream are not of one device", kInvalidHandle);
    }
    EventState* const state = event->state;
    const std::uint32_t record = state->recorded.fetch_add(1, std::memory_order_relaxed) + 1;
    machine().put(*stream, "record of an event",
                  [state, record](Stream::Random&) { advance(state->slot(record), record); }, {});
    return kSuccess;
  }
  static CUresult EventQuery(CUevent handle) {
    const Event* const event = machine().event(handle);
    if (event == nullptr) return unknown("an event");
    const std::uint32_t record = event->state->recorded.load(std::memory_order_relaxed);
    return record == 0 || reached(event->state->slot(record), record) ? kSuccess : kNotReady;
  }
  static CUresult EventSynchronize(CUevent handle) {
    Event* const event = machine().event(handle);
    if (event == nullptr) return unknown("an event");
    ++machine().host_waits;
    const std::uint32_t record = event->state->recorded.load(std::memory_order_relaxed);
    return record == 0 ? kSuccess : machine().wait_for_record("cuEventSynchronize", *event, record);
  }

  // --- memory

  static CUresult MemAlloc(CUdeviceptr* address, std::size_t bytes) {
    return allocate(MemoryKind::kCard, machine().current()->ordinal, bytes, address);
  }
  static CUresult MemFree(CUdeviceptr address) {
    Allocation* const memory = machine().memory.take(address, MemoryKind::kCard, MemoryKind::kPool);
    if (memory == nullptr) return unknown("memory for cuMemFree");
    // As CUDA: all that its card does is waited for, but not for memory of a pool.
    if (memory->kind == MemoryKind::kCard) {
      ++machine().host_waits;
      const CUresult result = machine().wait_for_device("cuMemFree", memory->device);
      if (result != kSuccess) return result;
    }
    if (memory->uses.load(std::memory_order_relaxed) > 0) return in_use(*memory, "cuMemFree");
    machine().memory.give_back(*memory);
    return kSuccess;
  }
  static CUresult MemAllocAsync(CUdeviceptr* address, std::size_t bytes, CUstream handle) {
    const Stream* const stream = machine().stream(handle);
    if (stream == nullptr) return unknown("a stream");
    return allocate(MemoryKind::kPool, stream->device, bytes, address);
  }
  static CUresult MemFreeAsync(CUdeviceptr address, CUstream handle) {
    Stream* const stream = machine().stream(handle);
    if (stream == nullptr) return unknown("a stream");
    Allocation* const memory = machine().memory.take(address, MemoryKind::kPool, MemoryKind::kCard);
    if (memory == nullptr) return unknown("memory for cuMemFreeAsync");
    machine().put(*stream, "free",
                  [memory](Stream::Random&) {
                    if (memory->uses.load(std::memory_order_relaxed) > 0) {
                      in_use(*memory, "cuMemFreeAsync");
                    }
                    machine().memory.give_back(*memory);
                  },
                  {});
    return kSuccess;
  }
  static CUresult MemHostAlloc(void** data, std::size_t bytes, unsigned) {
    CUdeviceptr address = 0;
    const CUresult result =
        allocate(MemoryKind::kPinned, machine().current()->ordinal, bytes, &address);
    if (result == kSuccess) *data = host(address);
    return result;
  }
  static CUresult MemFreeHost(void* data) {
    Allocation* const memory = machine().memory.take(std::bit_cast<std::uintptr_t>(data),
                                                     MemoryKind::kPinned, MemoryKind::kPinned);
    if (memory == nullptr) return unknown("memory for cuMemFreeHost");
    if (memory->uses.load(std::memory_order_relaxed) > 0) return in_use(*memory, "cuMemFreeHost");
    machine().memory.give_back(*memory);
    return kSuccess;
  }
  static CUresult MemcpyHtoDAsync(CUdeviceptr to, const void* from, std::size_t bytes,
                                  CUstream handle) {
    constexpr const char* kWhat = "copy to the card";
    if (is_pinned(from, bytes)) {
      return copy(kWhat, to, std::bit_cast<std::uintptr_t>(from), bytes, handle);
    }
    // As CUDA: what is not pinned may be changed when the call returns.
    Stream* const stream = machine().stream(handle);
    if (stream == nullptr) return unknown("a stream");
    if (bytes == 0) return kSuccess;
    Allocation* const target = machine().reachable(kWhat, to, bytes);
    if (target == nullptr) return kInvalidValue;
    const auto* const first = static_cast<const std::byte*>(from);
    machine().put(*stream, kWhat,
                  [to, staged = std::vector<std::byte>(first, first + bytes)](Stream::Random&) {
                    std::memcpy(host(to), staged.data(), staged.size());
                  },
                  {target});
    return kSuccess;
  }
  static CUresult MemcpyDtoHAsync(void* to, CUdeviceptr from, std::size_t bytes, CUstream handle) {
    constexpr const char* kWhat = "copy from the card";
    if (is_pinned(to, bytes)) {
      return copy(kWhat, std::bit_cast<std::uintptr_t>(to), from, bytes, handle);
    }
    // As CUDA: it is there when the call returns.
    Stream* const stream = machine().stream(handle);
    if (stream == nullptr) return unknown("a stream");
    if (bytes == 0) return kSuccess;
    Allocation* const source = machine().reachable(kWhat, from, bytes);
    if (source == nullptr) return kInvalidValue;
    machine().put(*stream, kWhat,
                  [to, from, bytes](Stream::Random&) { std::memcpy(to, host(from), bytes); },
                  {source});
    ++machine().host_waits;
    return machine().wait_for_stream("a copy to memory that is not pinned", *stream);
  }
  static CUresult MemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, std::size_t bytes,
                                  CUstream handle) {
    return copy("copy on the card", to, from, bytes, handle);
  }
  static CUresult MemsetD8Async(CUdeviceptr to, unsigned char value, std::size_t bytes,
                                CUstream handle) {
    Stream* const stream = machine().stream(handle);
    if (stream == nullptr) return unknown("a stream");
    if (bytes == 0) return kSuccess;
    Allocation* const target = machine().reachable("memset", to, bytes);
    if (target == nullptr) return kInvalidValue;
    machine().put(*stream, "memset",
                  [to, value, bytes](Stream::Random&) { std::memset(host(to), value, bytes); },
                  {target});
    return kSuccess;
  }
  static CUresult PointerGetAttribute(void* value, CUpointer_attribute which, CUdeviceptr address) {
    const Allocation* const memory = machine().memory.find(address);
    if (memory == nullptr) return kInvalidValue;  // the host's, for example
    const bool is_host = memory->kind == MemoryKind::kPinned;
    switch (which) {
      case kMemoryType:
        return give(value, is_host ? kHostMemory : kDeviceMemory);
      case kDeviceOrdinal:
        return give(value, memory->device);
      case kIpcCapable:
        return give(value, static_cast<int>(memory->kind == MemoryKind::kCard));
      case kRangeStartAddress:
        return give(value, CUdeviceptr{std::bit_cast<std::uintptr_t>(memory->data)});
      case kRangeSize:
        return give(value, memory->bytes);
      default:
        return kInvalidValue;
    }
  }

  // --- between processes

  static CUresult IpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr address) {
    const Allocation* const memory = machine().memory.find(address);
    if (memory == nullptr || memory->kind != MemoryKind::kCard) return kInvalidValue;
    *handle = {};
    std::snprintf(handle->reserved, sizeof handle->reserved, "%s %zu", memory->name.c_str(),
                  memory->bytes);
    return kSuccess;
  }
  static CUresult IpcOpenMemHandle(CUdeviceptr* address, CUipcMemHandle handle, unsigned flags) {
    char name[64] = "";
    std::size_t bytes = 0;
    handle.reserved[63] = '\0';
    if (flags != kIpcLazyPeerAccess ||
        std::sscanf(handle.reserved, "%63s %zu", name, &bytes) != 2) {
      return kInvalidValue;
    }
    const Allocation* const memory =
        machine().memory.open(name, bytes, machine().current()->ordinal);
    if (memory == nullptr) return kInvalidHandle;
    *address = std::bit_cast<std::uintptr_t>(memory->data);
    return kSuccess;
  }
  static CUresult IpcCloseMemHandle(CUdeviceptr address) {
    const Allocation* const memory = machine().memory.find(address);
    if (memory != nullptr && memory->kind == MemoryKind::kForeign &&
        memory->uses.load(std::memory_order_relaxed) > 0) {
      return in_use(*memory, "cuIpcCloseMemHandle");
    }
    return machine().memory.close(address) ? kSuccess : unknown("memory for cuIpcCloseMemHandle");
  }
  static CUresult IpcGetEventHandle(CUipcEventHandle* handle, CUevent event_handle) {
    const Event* const event = machine().event(event_handle);
    if (event == nullptr) return unknown("an event");
    if (event->name.empty()) return kInvalidHandle;
    *handle = {};
    std::snprintf(handle->reserved, sizeof handle->reserved, "%s", event->name.c_str());
    return kSuccess;
  }
  static CUresult IpcOpenEventHandle(CUevent* made, CUipcEventHandle handle) {
    handle.reserved[63] = '\0';
    Event* const event = machine().open_event(handle.reserved, machine().current()->ordinal);
    *made = std::bit_cast<CUevent>(event);
    return event != nullptr ? kSuccess : kInvalidHandle;
  }
};

struct ErrorName {
  CUresult result;
  const char* name;
};
constexpr ErrorName kErrorNames[] = {
    {kSuccess, "CUDA_SUCCESS"},
    {kInvalidValue, "CUDA_ERROR_INVALID_VALUE"},
    {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY"},
    {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED"},
    {100, "CUDA_ERROR_NO_DEVICE"},
    {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE"},
    {kInvalidImage, "CUDA_ERROR_INVALID_IMAGE"},
    {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT"},
    {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE"},
    {kNotFound, "CUDA_ERROR_NOT_FOUND"},
    {kNotReady, "CUDA_ERROR_NOT_READY"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
    {719, "CUDA_ERROR_LAUNCH_FAILED"},
    {999, "CUDA_ERROR_UNKNOWN"},
};

CUresult Functions::GetErrorName(CUresult result, const char** text) {
  const auto* const found = std::find_if(std::begin(kErrorNames), std::end(kErrorNames),
                                         [=](const ErrorName& e) { return e.result == result; });
  if (found == std::end(kErrorNames)) return kInvalidValue;
  *text = found->name;
  return kSuccess;
}

// How much a function asks of its caller.
enum class Needs { kNothing, kStart, kContext };

constexpr Needs needs(std::string_view name) {
  for (const std::string_view known : {"cuDriverGetVersion", "cuInit"}) {
    if (name == known) return Needs::kNothing;
  }
  const bool of_contexts = name.starts_with("cuCtx") || name.starts_with("cuDevice") ||
                           name == "cuPointerGetAttribute" || name == "cuEventQuery";
  return of_contexts ? Needs::kStart : Needs::kContext;
}

// Function names as template arguments.
template <std::size_t size>
struct Name {
  char text[size];
  constexpr Name(const char (&from)[size]) { std::copy(from, from + size, text); }  // NOLINT
};

template <Name name, auto function>
struct Guarded;
template <Name name, typename... Args, CUresult (*function)(Args...)>
struct Guarded<name, function> {
  static CUresult call(Args... args) {
    constexpr Needs kNeeds = needs(name.text);
    const CUresult result = machine().before(name.text, kNeeds == Needs::kContext);
    if (result != kSuccess) return result;
    if (kNeeds != Needs::kNothing && !machine().started.load()) return kNotInitialized;
    return function(args...);
  }
};

}  // namespace

void fill(DriverApi& api) {
#define SIMULATED_FUNCTION(name, symbol, parameters) \
  api.name = Guarded<"cu" #name, &Functions::name>::call;
  HOROPLUG_CUDA_FUNCTIONS(SIMULATED_FUNCTION)
#undef SIMULATED_FUNCTION
  // These explain what all others return.
  api.GetErrorName = Functions::GetErrorName;
  api.GetErrorString = Functions::GetErrorString;
}

}  // namespace horoplug::testing::simulated
