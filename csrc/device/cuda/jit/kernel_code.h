// The source of the kernels' code: NVRTC, which compiles each kernel on first use, or a file that
// nvcc has made (kernel_file.h) if NVRTC cannot be used.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "device/cuda/driver/nvrtc.h"
#include "device/cuda/jit/compile.h"
#include "device/cuda/jit/kernel_file.h"

namespace horoplug::cuda {

// The code for a GPU of this compute capability: a module that contains the named kernel. A module
// with several kernels is the same object for all of them. Throws Error. Usable from any thread.
using ImageSource =
    std::function<std::shared_ptr<const Image>(const std::string& kernel, int capability)>;

// Whether the file should provide the code for a GPU of this compute capability; 0: any.
bool needs_file(const Nvrtc& nvrtc, int capability);

// One line that says why there is no code, and how to provide it.
std::string no_code(const Nvrtc& nvrtc, const KernelFile& file, int capability);

// Searches `places` for the file, once and only if it is needed.
ImageSource kernel_code(Nvrtc nvrtc, LibraryPaths places, int driver_version, KernelCache cache);

}  // namespace horoplug::cuda
