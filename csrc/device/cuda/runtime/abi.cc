// The part of the C ABI that describes GPUs.
#include <cstring>
#include <exception>
#include <string>

#include "device/cuda/driver/capabilities.h"
#include "device/cuda/driver/nccl.h"
#include "horoplug/horoplug.h"

extern "C" hp_status hp_gpu_capabilities(const char* const* files, int32_t count, char** text) try {
  std::string lines;
  for (const std::string& line : horoplug::cuda::gpu_capabilities({{files, files + count}, true})) {
    lines += line + "\n";
  }
  *text = ::strdup(lines.c_str());
  return *text != nullptr ? HP_OK : HP_INTERNAL;
} catch (const std::exception&) {  // out of memory
  return HP_INTERNAL;
}

extern "C" int32_t hp_nccl_version(const char* const* files, int32_t count) try {
  const horoplug::cuda::Nccl nccl = horoplug::cuda::open_nccl({{files, files + count}, true});
  return nccl.ok() ? nccl.version : 0;
} catch (const std::exception&) {  // out of memory
  return 0;
}
