// The part of CUDA's run-time compiler that horoplug uses; see driver.h for how and why.
#pragma once

#include <cstddef>
#include <vector>

#include "device/cuda/driver/shared_library.h"

// NOLINTBEGIN(readability-identifier-naming,bugprone-macro-parentheses): the names are CUDA's.
// NOLINTNEXTLINE(bugprone-reserved-identifier)
struct _nvrtcProgram;
using nvrtcProgram = _nvrtcProgram*;
using nvrtcResult = int;  // an enum of C

namespace horoplug::cuda {

inline constexpr nvrtcResult kNvrtcSuccess = 0;
inline constexpr int kOldestNvrtc = 12000;

// Name and parameters of each function that returns an nvrtcResult.
// clang-format off
#define HOROPLUG_NVRTC_FUNCTIONS(X)                                                                \
  X(Version, (int* major, int* minor))                                                             \
  X(GetNumSupportedArchs, (int* count))                                                            \
  X(GetSupportedArchs, (int* archs))                                                               \
  X(CreateProgram, (nvrtcProgram*, const char* source, const char* name, int headers,              \
                    const char* const* header_sources, const char* const* header_names))           \
  X(DestroyProgram, (nvrtcProgram*))                                                               \
  X(CompileProgram, (nvrtcProgram, int count, const char* const* options))                         \
  X(GetPTXSize, (nvrtcProgram, std::size_t* bytes))                                                \
  X(GetPTX, (nvrtcProgram, char* ptx))                                                             \
  X(GetCUBINSize, (nvrtcProgram, std::size_t* bytes))                                              \
  X(GetCUBIN, (nvrtcProgram, char* cubin))                                                         \
  X(GetProgramLogSize, (nvrtcProgram, std::size_t* bytes))                                         \
  X(GetProgramLog, (nvrtcProgram, char* log))
// clang-format on

// One pointer for each function, under its name without "nvrtc".
struct NvrtcApi {
#define HOROPLUG_NVRTC_MEMBER(name, parameters) nvrtcResult(*name) parameters = nullptr;
  HOROPLUG_NVRTC_FUNCTIONS(HOROPLUG_NVRTC_MEMBER)
#undef HOROPLUG_NVRTC_MEMBER
};
// NOLINTEND(readability-identifier-naming,bugprone-macro-parentheses)

// Its version is as the driver counts: 12040 is 12.4.
struct Nvrtc : Opened<NvrtcApi> {
  std::vector<int> archs;  // target architectures, ascending: 75 is sm_75
};

// Opens an NVRTC whose code a driver of `driver_version` can load: one of the same or an earlier
// major version. 0: any version.
Nvrtc open_nvrtc(const LibraryPaths& places, int driver_version);

}  // namespace horoplug::cuda
