// Compiles kernels on first use, and keeps them in the user's cache.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>

#include "device/cuda/driver/nvrtc.h"
#include "device/cuda/jit/source.h"

namespace horoplug::cuda {

// Code that cuModuleLoadDataEx accepts: machine code for one architecture, or PTX with its
// terminating 0.
using Image = std::string;

// A hash of the kernels' source and of the compiler options. scripts/kernels.py computes it, too.
std::uint64_t source_key(std::span<const SourceFile> headers = kernel_headers());

// The inputs of one compilation.
struct Compilation {
  std::string kernel;     // a name of kernels/list.def
  std::string arch;       // "sm_90"; "compute_90" for PTX
  int nvrtc_version = 0;  // as in Nvrtc

  // A hash of all inputs, the source included.
  std::uint64_t key(std::span<const SourceFile> headers = kernel_headers()) const;
};

// For a GPU of compute capability `capability` (90 is 9.0). A GPU that is newer than the compiler
// gets PTX for the newest architecture that the compiler knows. Throws Error(HP_UNSUPPORTED) if the
// GPU is too old or the kernel unknown.
Compilation plan_compilation(const Nvrtc& nvrtc, const std::string& kernel, int capability);

// Throws Error with the compiler's message.
Image compile_kernel(const NvrtcApi& nvrtc, const Compilation& compilation);

// Images by key. Failures to read or write count as a cache miss: the folder may be on a full disk,
// read-only, or shared by many processes, each of which writes whole files.
class KernelCache {
 public:
  // An empty path disables the cache.
  explicit KernelCache(std::filesystem::path folder) : folder_(std::move(folder)) {}

  // $XDG_CACHE_HOME/horoplug/kernels, or the same in ~/.cache; empty if there is neither.
  static std::filesystem::path default_folder();

  std::optional<Image> find(std::uint64_t key) const;
  void put(std::uint64_t key, const Image& image) const;

 private:
  std::filesystem::path file(std::uint64_t key) const;

  std::filesystem::path folder_;
};

// Returns the image from the cache, or compiles and stores it.
Image kernel_image(const Nvrtc& nvrtc, const KernelCache& cache, const std::string& kernel,
                   int capability);

}  // namespace horoplug::cuda
