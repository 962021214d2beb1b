// The CUDA components that were found, for `horovodrun --check-build -v`.
#pragma once

#include <string>
#include <vector>

#include "device/cuda/driver/shared_library.h"

namespace horoplug::cuda {

// One line each for the driver with its devices, NVRTC, NCCL, and the origin of the kernels: "[X] "
// and the component that was found, or "[ ] " and why it cannot be used. Starts the driver: see
// start_driver().
std::vector<std::string> gpu_capabilities(const LibraryPaths& places);

}  // namespace horoplug::cuda
