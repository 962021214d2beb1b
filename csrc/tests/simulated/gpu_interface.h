// What the simulated NCCL needs of the simulated GPU. In C, because they may be two libraries.
#pragma once

#include <cstddef>

#include "device/cuda/driver/driver.h"

namespace horoplug::testing::simulated {

struct GpuInterface {
  // Of the thread's context; 0 if it has none.
  int (*current_device)();
  CUresult (*uuid)(CUuuid* uuid, int device);
  // -1: there is no such stream. The default stream is on every device.
  int (*stream_device)(CUstream stream, int device);
  // Puts work into a stream, with the memory that it uses, of `bytes` bytes each. `data` is dropped
  // when it is done, or will not be.
  CUresult (*enqueue)(CUstream stream, int device, const char* what, void (*work)(void* data),
                      void* data, void (*drop)(void* data), const void* const* memory,
                      const std::size_t* bytes, std::size_t count);
  // Waits for all that the device does.
  CUresult (*wait)(const char* call, int device);
  // Streams give up waiting.
  bool (*stopped)();
  void (*misuse)(const char* what);
};

// Over the machine of this process.
const GpuInterface& gpu_interface();

}  // namespace horoplug::testing::simulated
