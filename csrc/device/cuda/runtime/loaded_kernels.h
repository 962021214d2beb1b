// The kernels that a GPU has loaded: each is loaded once, on first use, for all launchers. (The
// driver may block the calling thread until the GPU is idle while it loads a kernel.)
#pragma once

#include <map>
#include <memory>
#include <string>

#include "device/cuda/jit/kernel_code.h"
#include "device/cuda/runtime/context.h"

namespace horoplug::cuda {

// For one thread at a time.
class LoadedKernels {
 public:
  LoadedKernels(const Context& context, ImageSource images)
      : context_(context), images_(std::move(images)) {}

  // Throws Error.
  CUfunction get(const std::string& name);

 private:
  const Module& module_of(const std::shared_ptr<const Image>& image);

  const Context& context_;
  const ImageSource images_;
  std::map<std::shared_ptr<const Image>, Module> modules_;  // by address
  std::map<std::string, CUfunction> functions_;
};

}  // namespace horoplug::cuda
