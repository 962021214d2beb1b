// The functions of the simulated GPU that the simulated NCCL calls. They are a table of C functions
// because the two can be separate shared libraries.
#pragma once

#include <cstddef>

#include "device/cuda/driver/driver.h"

namespace horoplug::testing::simulated {

struct GpuInterface {
  // The device of the calling thread's current context; 0 without a context.
  int (*current_device)();
  CUresult (*uuid)(CUuuid* uuid, int device);
  // The device that a stream belongs to; -1 if the handle is invalid. A default stream belongs to
  // `device`.
  int (*stream_device)(CUstream stream, int device);
  // Enqueues work on a stream. `memory` and `bytes` are the `count` buffers that the work uses, and
  // their sizes. `drop(data)` is called once the work has run or has been discarded.
  CUresult (*enqueue)(CUstream stream, int device, const char* what, void (*work)(void* data),
                      void* data, void (*drop)(void* data), const void* const* memory,
                      const std::size_t* bytes, std::size_t count);
  // Blocks until all streams of the device are idle.
  CUresult (*wait)(const char* call, int device);
  // True once the device is lost or destroyed: work in streams must stop waiting.
  bool (*stopped)();
  void (*misuse)(const char* what);
};

// The interface to the machine of this process.
const GpuInterface& gpu_interface();

}  // namespace horoplug::testing::simulated
