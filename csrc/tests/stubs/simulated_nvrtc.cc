// A libnvrtc.so.12 whose compiled code is the kernel's name, which simulated_cuda.cc runs. It
// reports a version that NVRTC does not have, so that a kernel cache never returns its output in
// place of real code. The environment variable SIMULATED_NVRTC_VERSION sets another version: 11080
// is 11.8.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>
#include <string_view>

#include "device/cuda/driver/nvrtc.h"
#include "tests/simulated/settings.h"
#include "tests/simulated/simulated_gpu.h"

struct _nvrtcProgram {  // NOLINT(bugprone-reserved-identifier)
  std::string code;
};

namespace {

constexpr int kArchs[] = {75, 80, 90};
constexpr std::string_view kOption = "-DHP_ONLY=";
constexpr nvrtcResult kCompilationFailed = 6;

// Returns copy_8 for "HP_MOVE(copy_8, U8, U8)".
std::string first_argument(std::string_view macro) {
  const std::size_t from = std::min(macro.find('('), macro.size() - 1) + 1;
  return std::string(macro.substr(from, macro.find_first_of(",)", from) - from));
}

nvrtcResult store(const std::string& text, std::size_t* bytes) {
  *bytes = text.size() + 1;
  return 0;
}
nvrtcResult store(const std::string& text, char* to) {
  std::memcpy(to, text.c_str(), text.size() + 1);
  return 0;
}

}  // namespace

#define SIMULATED_EXPORT __attribute__((visibility("default")))

// NOLINTBEGIN(readability-identifier-naming): NVRTC defines the names.
extern "C" {

SIMULATED_EXPORT nvrtcResult nvrtcVersion(int* major, int* minor) {
  const auto version = horoplug::testing::simulated::setting("SIMULATED_NVRTC_VERSION", 12990LL);
  *major = static_cast<int>(version / 1000);
  *minor = static_cast<int>(version % 1000 / 10);
  return 0;
}
SIMULATED_EXPORT nvrtcResult nvrtcGetNumSupportedArchs(int* count) {
  *count = static_cast<int>(std::size(kArchs));
  return 0;
}
SIMULATED_EXPORT nvrtcResult nvrtcGetSupportedArchs(int* archs) {
  std::copy(std::begin(kArchs), std::end(kArchs), archs);
  return 0;
}
SIMULATED_EXPORT nvrtcResult nvrtcCreateProgram(nvrtcProgram* made, const char*, const char*, int,
                                                const char* const*, const char* const*) {
  *made = new _nvrtcProgram;
  return 0;
}
SIMULATED_EXPORT nvrtcResult nvrtcDestroyProgram(nvrtcProgram* program) {
  delete *program;
  *program = nullptr;
  return 0;
}
SIMULATED_EXPORT nvrtcResult nvrtcCompileProgram(nvrtcProgram program, int count,
                                                 const char* const* options) {
  for (int i = 0; i < count; ++i) {
    const std::string_view option = options[i];
    if (!option.starts_with(kOption)) continue;
    program->code =
        horoplug::testing::SimulatedGpu::image(first_argument(option.substr(kOption.size())));
    return 0;
  }
  return kCompilationFailed;
}
SIMULATED_EXPORT nvrtcResult nvrtcGetPTXSize(nvrtcProgram program, std::size_t* bytes) {
  return store(program->code, bytes);
}
SIMULATED_EXPORT nvrtcResult nvrtcGetPTX(nvrtcProgram program, char* to) {
  return store(program->code, to);
}
SIMULATED_EXPORT nvrtcResult nvrtcGetCUBINSize(nvrtcProgram program, std::size_t* bytes) {
  return store(program->code, bytes);
}
SIMULATED_EXPORT nvrtcResult nvrtcGetCUBIN(nvrtcProgram program, char* to) {
  return store(program->code, to);
}
SIMULATED_EXPORT nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram, std::size_t* bytes) {
  return store("", bytes);
}
SIMULATED_EXPORT nvrtcResult nvrtcGetProgramLog(nvrtcProgram, char* log) { return store("", log); }

}  // extern "C"
// NOLINTEND(readability-identifier-naming)
