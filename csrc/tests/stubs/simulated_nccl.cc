// A libnccl.so.2 that uses the libcuda.so.1 of simulated_cuda.cc in the same folder. Environment
// variables configure it:
//   SIMULATED_GPU_FOLDER        a folder through which the processes share memory
//   SIMULATED_NCCL_VERSION      22304 is 2.23.4
//   SIMULATED_NCCL_LATE         on average, one in so many non-blocking calls returns
//                               ncclInProgress; 0: none
//   SIMULATED_NCCL_FAIL         functions that fail, separated by commas: ncclAllReduce
//   NCCL_MULTI_RANK_GPU_ENABLE  1: several ranks may share a GPU
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <sstream>

#include "tests/simulated/nccl_functions.h"
#include "tests/simulated/settings.h"

namespace horoplug::testing::simulated {
namespace {

// Returns the interface of the simulated GPU's library.
const GpuInterface& load_gpu_interface() {
  Dl_info here{};
  ::dladdr(reinterpret_cast<const void*>(&load_gpu_interface), &here);
  const auto path = std::filesystem::path(here.dli_fname).replace_filename("libcuda.so.1");
  void* const gpu = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  void* const function = gpu != nullptr ? ::dlsym(gpu, "simulated_gpu_interface") : nullptr;
  if (function == nullptr) {
    std::fprintf(stderr, "simulated NCCL: no simulated GPU beside it: %s\n", ::dlerror());
    std::abort();
  }
  return *static_cast<const GpuInterface*>(reinterpret_cast<const void* (*)()>(function)());
}

std::unique_ptr<NcclMachine> make() {
  SimulatedNcclOptions options;
  options.folder = setting("SIMULATED_GPU_FOLDER", "");
  options.version = static_cast<int>(setting("SIMULATED_NCCL_VERSION", options.version));
  options.late = static_cast<int>(setting("SIMULATED_NCCL_LATE", options.late));
  auto made = std::make_unique<NcclMachine>(load_gpu_interface(), std::move(options));
  std::istringstream list(setting("SIMULATED_NCCL_FAIL", ""));
  for (std::string name; std::getline(list, name, ',');) made->set_failure(name, kInternalError);
  return made;
}

[[maybe_unused]] const bool kReady = (NcclMachine::set_factory(make), true);

}  // namespace
}  // namespace horoplug::testing::simulated

using horoplug::testing::simulated::NcclCheckedFunction;
using horoplug::testing::simulated::NcclConfig;
using horoplug::testing::simulated::NcclFunctions;
using horoplug::testing::simulated::NcclMachine;

// NOLINTBEGIN(readability-identifier-naming,bugprone-macro-parentheses): NCCL defines the names.
// As in simulated_cuda.cc.
#define SIMULATED_EXPORT __attribute__((visibility("default")))
#define SIMULATED_SYMBOL(name, parameters)                                             \
  extern "C" {                                                                         \
  static ncclResult_t(*resolve_nccl##name()) parameters __asm__("resolve_nccl" #name); \
  static ncclResult_t(*resolve_nccl##name()) parameters {                              \
    return NcclCheckedFunction<"nccl" #name, &NcclFunctions::name>::call;              \
  }                                                                                    \
  SIMULATED_EXPORT ncclResult_t nccl##name parameters                                  \
      __attribute__((ifunc("resolve_nccl" #name)));                                    \
  }
HOROPLUG_NCCL_FUNCTIONS(SIMULATED_SYMBOL)

extern "C" {

SIMULATED_EXPORT const char* ncclGetErrorString(ncclResult_t result) {
  return NcclFunctions::GetErrorString(result);
}
SIMULATED_EXPORT const char* ncclGetLastError(ncclComm_t communicator) {
  return NcclFunctions::GetLastError(communicator);
}
// These are the functions of SimulatedNccl.
SIMULATED_EXPORT void simulated_nccl_fail(const char* function, ncclResult_t result) {
  NcclMachine::get().set_failure(function, result);
}
SIMULATED_EXPORT void simulated_nccl_set_async_error(ncclResult_t error) {
  NcclMachine::get().set_async_error(error);
}

}  // extern "C"
// NOLINTEND(readability-identifier-naming,bugprone-macro-parentheses)
