// CUDA's libraries in this process, each opened once as a table of functions, and the source of the
// kernels' code. Tests make one of their own.
#pragma once

#include <memory>
#include <string>

#include "device/cuda/driver/driver.h"
#include "device/cuda/driver/nccl.h"
#include "device/cuda/runtime/launcher.h"

namespace horoplug::cuda {

struct Toolkit {
  DriverApi driver;
  ImageSource images;
  NcclApi nccl;
  int nccl_version = 0;      // as in Nccl; 0: NCCL is not used
  std::string nccl_problem;  // why NCCL is not used, in one line
};

// Starts the driver. Throws Error(HP_UNSUPPORTED) with one line that says why GPUs cannot be used.
// NVRTC, or a file in its place, is needed for kernels only; NCCL is optional.
std::shared_ptr<const Toolkit> open_toolkit(const LibraryPaths& places);

}  // namespace horoplug::cuda
