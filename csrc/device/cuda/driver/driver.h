// The part of CUDA's driver API that horoplug uses, declared here, so that it is built without CUDA
// and runs with any driver that is new enough.
//
// All calls go through one table of function pointers, which tests replace.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "device/cuda/driver/shared_library.h"

// NOLINTBEGIN(readability-identifier-naming,bugprone-macro-parentheses): the names are CUDA's. All
// but the numbers are opaque.
struct CUctx_st;
struct CUevent_st;
struct CUfunc_st;
struct CUmod_st;
struct CUstream_st;
using CUcontext = CUctx_st*;
using CUevent = CUevent_st*;
using CUfunction = CUfunc_st*;
using CUmodule = CUmod_st*;
using CUstream = CUstream_st*;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUresult = int;  // enums of C
using CUdevice_attribute = int;
using CUjit_option = int;
using CUpointer_attribute = int;
using CUstreamCaptureStatus = int;
using CUhostFn = void (*)(void* data);
struct CUuuid {
  char bytes[16];
};
// Handles by which another process opens memory or an event.
struct CUipcMemHandle {
  char reserved[64];
};
struct CUipcEventHandle {
  char reserved[64];
};

namespace horoplug::cuda {

// Values of CUresult.
inline constexpr CUresult kSuccess = 0;
inline constexpr CUresult kOutOfMemory = 2;
inline constexpr CUresult kNotReady = 600;

// Values of CUdevice_attribute.
inline constexpr CUdevice_attribute kMultiprocessorCount = 16;
inline constexpr CUdevice_attribute kComputeCapabilityMajor = 75;
inline constexpr CUdevice_attribute kComputeCapabilityMinor = 76;
inline constexpr CUdevice_attribute kMemoryPoolsSupported = 115;
inline constexpr CUdevice_attribute kIpcEventSupported = 125;

// Values of CUpointer_attribute, with the type of the attribute.
inline constexpr CUpointer_attribute kMemoryType = 2;     // unsigned, one of the next two
inline constexpr CUpointer_attribute kDeviceOrdinal = 9;  // int
inline constexpr CUpointer_attribute kIpcCapable = 10;    // int, whether IpcGetMemHandle does it
inline constexpr CUpointer_attribute kRangeStartAddress = 11;  // CUdeviceptr, of the allocation
inline constexpr CUpointer_attribute kRangeSize = 12;          // size_t
inline constexpr unsigned kHostMemory = 1;
inline constexpr unsigned kDeviceMemory = 2;

// Values of CUstreamCaptureStatus.
inline constexpr CUstreamCaptureStatus kNotCapturing = 0;

// Flags.
inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr unsigned kEventInterprocess = 4;  // needs kEventDisableTiming, too
inline constexpr unsigned kEventDefault = 0;
inline constexpr unsigned kIpcLazyPeerAccess = 1;
inline constexpr unsigned kHostPortable = 1;
inline constexpr unsigned kHostMapped = 2;
inline constexpr unsigned kWaitAtLeast = 0;  // by a cyclic comparison: (int)(*word - value) >= 0

// Of CUDA 12.0, which driver 525 brings. Older ones get no releases of the frameworks any more.
inline constexpr int kOldestDriver = 12000;

// Name, symbol, and parameters of each function; all return a CUresult. CUDA gives a function that
// has changed a new symbol.
// clang-format off
#define HOROPLUG_CUDA_FUNCTIONS(X)                                                                 \
  X(Init, cuInit, (unsigned flags))                                                                \
  X(DriverGetVersion, cuDriverGetVersion, (int* version))                                          \
  X(GetErrorName, cuGetErrorName, (CUresult, const char** text))                                   \
  X(GetErrorString, cuGetErrorString, (CUresult, const char** text))                               \
  X(DeviceGetCount, cuDeviceGetCount, (int* count))                                                \
  X(DeviceGet, cuDeviceGet, (CUdevice*, int ordinal))                                              \
  X(DeviceGetName, cuDeviceGetName, (char* name, int size, CUdevice))                              \
  X(DeviceGetAttribute, cuDeviceGetAttribute, (int* value, CUdevice_attribute, CUdevice))          \
  X(DeviceTotalMem, cuDeviceTotalMem_v2, (std::size_t* bytes, CUdevice))                           \
  X(DeviceGetUuid, cuDeviceGetUuid_v2, (CUuuid*, CUdevice))                                        \
  X(DevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, (CUcontext*, CUdevice))                      \
  X(DevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, (CUdevice))                             \
  X(CtxPushCurrent, cuCtxPushCurrent_v2, (CUcontext))                                              \
  X(CtxPopCurrent, cuCtxPopCurrent_v2, (CUcontext*))                                               \
  X(CtxGetDevice, cuCtxGetDevice, (CUdevice*))                                                     \
  X(ModuleLoadDataEx, cuModuleLoadDataEx, (CUmodule*, const void* image, unsigned options,         \
                                           CUjit_option*, void** values))                          \
  X(ModuleUnload, cuModuleUnload, (CUmodule))                                                      \
  X(ModuleGetFunction, cuModuleGetFunction, (CUfunction*, CUmodule, const char* name))             \
  X(LaunchKernel, cuLaunchKernel, (CUfunction, unsigned grid_x, unsigned grid_y, unsigned grid_z,  \
                                   unsigned block_x, unsigned block_y, unsigned block_z,           \
                                   unsigned shared_bytes, CUstream, void** parameters,             \
                                   void** extra))                                                  \
  X(StreamCreateWithPriority, cuStreamCreateWithPriority, (CUstream*, unsigned flags,              \
                                                           int priority))                          \
  X(StreamDestroy, cuStreamDestroy_v2, (CUstream))                                                 \
  X(StreamWaitEvent, cuStreamWaitEvent, (CUstream, CUevent, unsigned flags))                       \
  X(StreamSynchronize, cuStreamSynchronize, (CUstream))                                            \
  X(StreamIsCapturing, cuStreamIsCapturing, (CUstream, CUstreamCaptureStatus*))                    \
  X(StreamWaitValue32, cuStreamWaitValue32_v2, (CUstream, CUdeviceptr, std::uint32_t value,        \
                                                unsigned flags))                                   \
  X(StreamWriteValue32, cuStreamWriteValue32_v2, (CUstream, CUdeviceptr, std::uint32_t value,      \
                                                  unsigned flags))                                 \
  X(LaunchHostFunc, cuLaunchHostFunc, (CUstream, CUhostFn, void* data))                            \
  X(EventCreate, cuEventCreate, (CUevent*, unsigned flags))                                        \
  X(EventDestroy, cuEventDestroy_v2, (CUevent))                                                    \
  X(EventRecord, cuEventRecord, (CUevent, CUstream))                                               \
  X(EventQuery, cuEventQuery, (CUevent))                                                           \
  X(EventSynchronize, cuEventSynchronize, (CUevent))                                               \
  X(MemAlloc, cuMemAlloc_v2, (CUdeviceptr*, std::size_t bytes))                                    \
  X(MemFree, cuMemFree_v2, (CUdeviceptr))                                                          \
  X(MemAllocAsync, cuMemAllocAsync, (CUdeviceptr*, std::size_t bytes, CUstream))                   \
  X(MemFreeAsync, cuMemFreeAsync, (CUdeviceptr, CUstream))                                         \
  X(MemHostAlloc, cuMemHostAlloc, (void**, std::size_t bytes, unsigned flags))                     \
  X(MemFreeHost, cuMemFreeHost, (void*))                                                           \
  X(MemHostRegister, cuMemHostRegister_v2, (void*, std::size_t bytes, unsigned flags))             \
  X(MemHostUnregister, cuMemHostUnregister, (void*))                                               \
  X(MemHostGetDevicePointer, cuMemHostGetDevicePointer_v2, (CUdeviceptr*, void*, unsigned flags))  \
  X(MemcpyHtoDAsync, cuMemcpyHtoDAsync_v2, (CUdeviceptr, const void*, std::size_t, CUstream))      \
  X(MemcpyDtoHAsync, cuMemcpyDtoHAsync_v2, (void*, CUdeviceptr, std::size_t, CUstream))            \
  X(MemcpyDtoDAsync, cuMemcpyDtoDAsync_v2, (CUdeviceptr, CUdeviceptr, std::size_t, CUstream))      \
  X(MemsetD8Async, cuMemsetD8Async, (CUdeviceptr, unsigned char, std::size_t, CUstream))           \
  X(PointerGetAttribute, cuPointerGetAttribute, (void* value, CUpointer_attribute, CUdeviceptr))   \
  X(IpcGetMemHandle, cuIpcGetMemHandle, (CUipcMemHandle*, CUdeviceptr))                            \
  X(IpcOpenMemHandle, cuIpcOpenMemHandle_v2, (CUdeviceptr*, CUipcMemHandle, unsigned flags))       \
  X(IpcCloseMemHandle, cuIpcCloseMemHandle, (CUdeviceptr))                                         \
  X(IpcGetEventHandle, cuIpcGetEventHandle, (CUipcEventHandle*, CUevent))                          \
  X(IpcOpenEventHandle, cuIpcOpenEventHandle, (CUevent*, CUipcEventHandle))
// clang-format on

// One pointer for each function, under its name without "cu".
struct DriverApi {
#define HOROPLUG_CUDA_MEMBER(name, symbol, parameters) CUresult(*name) parameters = nullptr;
  HOROPLUG_CUDA_FUNCTIONS(HOROPLUG_CUDA_MEMBER)
#undef HOROPLUG_CUDA_MEMBER
};
// NOLINTEND(readability-identifier-naming,bugprone-macro-parentheses)

// Its version is CUDA's: 12040 is 12.4.
using Driver = Opened<DriverApi>;

// Opens libcuda.so.1. Does not start it.
Driver open_driver(const LibraryPaths& places = {});

// Calls cuInit, after which the process must not fork and use CUDA in the child. Returns the
// problem in one line, or an empty string.
std::string start_driver(const DriverApi& api);

// "CUDA_ERROR_NO_DEVICE (no CUDA-capable device is detected)".
std::string describe(const DriverApi& api, CUresult result);

// Throws Error(HP_ABORTED) that names the call, unless the result is success.
void check(const DriverApi& api, CUresult result, std::string_view call);

struct DeviceProperties {
  std::string name;
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  std::size_t memory = 0;  // bytes
};

// Properties of device `ordinal`. The driver must have been started. Throws Error.
DeviceProperties device_properties(const DriverApi& api, int ordinal);

}  // namespace horoplug::cuda
