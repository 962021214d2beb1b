// Driver functions: modules and kernel launches.
#include <cstring>
#include <string_view>
#include <vector>

#include "device/cuda/kernels/tables.h"
#include "tests/harness/host_grid.h"
#include "tests/simulated/functions.h"

namespace horoplug::testing::simulated {

using namespace horoplug::cuda;

namespace {

constexpr std::string_view kImage = "simulated kernel: ";

}  // namespace

CUresult Functions::ModuleLoadDataEx(CUmodule* made, const void* image, unsigned, CUjit_option*,
                                     void**) {
  const auto* const text = static_cast<const char*>(image);
  if (std::strncmp(text, kImage.data(), kImage.size()) != 0) return kInvalidImage;
  const int device = machine().current()->ordinal;
  *made = reinterpret_cast<CUmodule>(machine().make_module(device, text + kImage.size()));
  return kSuccess;
}

CUresult Functions::ModuleUnload(CUmodule handle) {
  return machine().destroy(handle) ? kSuccess : unknown_handle("a module");
}

CUresult Functions::ModuleGetFunction(CUfunction* function, CUmodule handle, const char* name) {
  Module* const module = machine().module(handle);
  if (module == nullptr) return unknown_handle("a module");
  const bool has = module->kernel.empty() || module->kernel == name;
  if (!has || args_bytes(name) == 0) return kNotFound;
  *function = reinterpret_cast<CUfunction>(machine().make_kernel(*module, name));
  return kSuccess;
}

CUresult Functions::LaunchKernel(CUfunction handle, unsigned grid, unsigned grid_y, unsigned grid_z,
                                 unsigned block, unsigned block_y, unsigned block_z, unsigned,
                                 CUstream stream_handle, void** parameters, void**) {
  const Kernel* const kernel = machine().kernel(handle);
  if (kernel == nullptr) return unknown_handle("a kernel");
  Stream* const stream = machine().stream(stream_handle);
  if (stream == nullptr) return unknown_handle("a stream");
  if (stream->device != kernel->module->device || stream->device != machine().current()->ordinal) {
    return machine().misuse("kernel, stream and context are not of one device", kInvalidHandle);
  }
  if (grid == 0 || grid_y != 1 || grid_z != 1 || block != kThreads || block_y != 1 ||
      block_z != 1) {
    return kInvalidValue;
  }
  const auto* const first = static_cast<const std::byte*>(parameters[0]);
  const std::vector<std::byte> args(first, first + args_bytes(kernel->name));
  machine().enqueue(
      *stream, kernel->name.c_str(),
      [kernel, args, grid](Stream::Random& random) {
        run_on_cpu(kernel->name, args.data(), grid, random, /*threads=*/1);
      },
      machine().referenced(args));
  return kSuccess;
}

}  // namespace horoplug::testing::simulated
