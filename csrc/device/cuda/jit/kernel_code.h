// Where the kernels' code comes from: NVRTC, which compiles each when it is first needed, or if it
// cannot be used, a file that nvcc has made (kernel_file.h).
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "device/cuda/driver/nvrtc.h"
#include "device/cuda/jit/compile.h"
#include "device/cuda/jit/kernel_file.h"

namespace horoplug::cuda {

// The code for a GPU of this compute capability, a module that has the kernel of this name. One
// that has others, too, is the same object for all of them. Throws Error. For any thread.
using ImageSource =
    std::function<std::shared_ptr<const Image>(const std::string& kernel, int capability)>;

// Whether the file is to be asked for the code for a GPU of this compute capability, 0: any.
bool needs_file(const Nvrtc& nvrtc, int capability);

// One line that says why there is no code, and how to have it.
std::string no_code(const Nvrtc& nvrtc, const KernelFile& file, int capability);

// Looks for the file among `places` if that is needed, once.
ImageSource kernel_code(Nvrtc nvrtc, LibraryPaths places, int driver_version, KernelCache cache);

}  // namespace horoplug::cuda
