// The kernels' source, which is embedded in the library, and the list of kernels.
#pragma once

#include <span>
#include <string>

namespace horoplug::cuda {

struct SourceFile {
  const char* name;  // the name used by #include
  const char* text;
};

// kernels.cu and its headers. CMake generates this from csrc/device/cuda/kernels.
const SourceFile& kernel_source();
std::span<const SourceFile> kernel_headers();

struct KernelName {
  const char* name;
  const char* only;  // the compiler option that selects this kernel alone
};
std::span<const KernelName> kernel_names();

// The entry of one kernel; nullptr if the name is unknown.
const KernelName* find_kernel(const std::string& name);

}  // namespace horoplug::cuda
