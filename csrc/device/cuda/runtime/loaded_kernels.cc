#include "device/cuda/runtime/loaded_kernels.h"

namespace horoplug::cuda {

CUfunction LoadedKernels::get(const std::string& name) {
  const auto known = functions_.find(name);
  if (known != functions_.end()) return known->second;
  const Module& module = module_of(images_(name, context_.capability()));
  return functions_.emplace(name, module.function(name)).first->second;
}

const Module& LoadedKernels::module_of(const std::shared_ptr<const Image>& image) {
  const auto known = modules_.find(image);
  if (known != modules_.end()) return known->second;
  return modules_.try_emplace(image, context_, *image).first->second;
}

}  // namespace horoplug::cuda
