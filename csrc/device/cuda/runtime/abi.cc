// The part of the C ABI that describes GPUs.
#include <cstring>
#include <exception>
#include <string>

#include "device/cuda/driver/capabilities.h"
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
