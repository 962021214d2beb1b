// Kernels compiled when they are first needed, and kept in the user's cache.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>

#include "device/cuda/driver/nvrtc.h"
#include "device/cuda/jit/source.h"

namespace horoplug::cuda {

// Code that cuModuleLoadDataEx takes: machine code for one architecture, or PTX, with the 0 that
// ends it.
using Image = std::string;

// A number that differs if the kernels' source does, or the options that they are compiled with.
// scripts/kernels.py computes it, too.
std::uint64_t source_key(std::span<const SourceFile> headers = kernel_headers());

// What one compilation depends on.
struct Compilation {
  std::string kernel;     // a name of kernels/list.def
  std::string arch;       // "sm_90"; "compute_90" for PTX
  int nvrtc_version = 0;  // as in Nvrtc

  // A number that differs if anything does, the source included.
  std::uint64_t key(std::span<const SourceFile> headers = kernel_headers()) const;
};

// For a GPU of compute capability `capability` (90 is 9.0). A GPU that is newer than the compiler
// gets PTX for the newest that it knows. Throws Error(HP_UNSUPPORTED) for a GPU that is too old,
// or a kernel that is unknown.
Compilation plan_compilation(const Nvrtc& nvrtc, const std::string& kernel, int capability);

// Throws Error with the compiler's message.
Image compile_kernel(const NvrtcApi& nvrtc, const Compilation& compilation);

// Images by key. What cannot be read or written is as if it were not there: the folder may be on a
// full disk, read-only, or shared by many processes, each of which writes whole files.
class KernelCache {
 public:
  // An empty path: nothing is kept.
  explicit KernelCache(std::filesystem::path folder) : folder_(std::move(folder)) {}

  // $XDG_CACHE_HOME/horoplug/kernels, or the same in ~/.cache; empty if there is neither.
  static std::filesystem::path default_folder();

  std::optional<Image> find(std::uint64_t key) const;
  void put(std::uint64_t key, const Image& image) const;

 private:
  std::filesystem::path file(std::uint64_t key) const;

  std::filesystem::path folder_;
};

// From the cache, or compiled and put there.
Image kernel_image(const Nvrtc& nvrtc, const KernelCache& cache, const std::string& kernel,
                   int capability);

}  // namespace horoplug::cuda
