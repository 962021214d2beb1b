#include "device/cuda/driver/nccl.h"

namespace horoplug::cuda {
namespace {

std::string inspect_nccl(void* library, Nccl& nccl) {
  NcclApi& api = nccl.api;
  if (!find_function(library, "ncclGetVersion", api.GetVersion)) return "has no ncclGetVersion";
  if (const ncclResult_t result = api.GetVersion(&nccl.version); result != kNcclSuccess) {
    return "ncclGetVersion fails with " + std::to_string(result);
  }
  if (nccl.version < kOldestNccl) {
    return "version " + nccl_version(nccl.version) + " is too old: " + nccl_version(kOldestNccl) +
           " is needed";
  }
#define HOROPLUG_NCCL_FIND(name, parameters) \
  if (!find_function(library, "nccl" #name, api.name)) return "has no nccl" #name;
  HOROPLUG_NCCL_FUNCTIONS(HOROPLUG_NCCL_FIND)
  HOROPLUG_NCCL_TEXTS(HOROPLUG_NCCL_FIND)
#undef HOROPLUG_NCCL_FIND
  return {};
}

}  // namespace

Nccl open_nccl(const LibraryPaths& places) {
  return open_library<Nccl>({"libnccl.so.2"}, places, inspect_nccl);
}

std::string nccl_version(int number) {
  // Up to 2.8, two digits less.
  const int major = number < 10000 ? 1000 : 10000;
  return std::to_string(number / major) + "." + std::to_string(number % major / 100) + "." +
         std::to_string(number % 100);
}

}  // namespace horoplug::cuda
