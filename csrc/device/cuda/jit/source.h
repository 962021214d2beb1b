// The kernels' source, which the library carries, and the list of kernels.
#pragma once

#include <span>
#include <string>

namespace horoplug::cuda {

struct SourceFile {
  const char* name;  // as it is included
  const char* text;
};

// kernels.cu, and what it includes. CMake makes this from csrc/device/cuda/kernels.
const SourceFile& kernel_source();
std::span<const SourceFile> kernel_headers();

struct KernelName {
  const char* name;
  const char* only;  // the option by which kernels.cu has this kernel alone
};
std::span<const KernelName> kernel_names();

// Of one kernel; nullptr if there is none of this name.
const KernelName* find_kernel(const std::string& name);

}  // namespace horoplug::cuda
