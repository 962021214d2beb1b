// Stub libraries with the symbols of the CUDA driver, NVRTC and NCCL. CMakeLists.txt builds
// working, old and broken ones from this file and cuda_functions.cc, with these macros:
//   STUB_DRIVER, STUB_NVRTC, STUB_NCCL   selects the library; the value is the version it reports
//   STUB_FAILURE                         the result of its version function
//   STUB_START                           the result of cuInit
//   STUB_INCOMPLETE                      the library has no function but its version function
#include <cstring>

#include "device/cuda/driver/driver.h"

#ifndef STUB_FAILURE
#define STUB_FAILURE 0
#endif
#ifndef STUB_START
#define STUB_START 0
#endif
#define STUB_EXPORT __attribute__((visibility("default")))

extern "C" {

// NOLINTBEGIN(readability-identifier-naming): CUDA and NCCL define the names.

#if defined(STUB_DRIVER)

STUB_EXPORT int cuDriverGetVersion(int* version) {
  *version = STUB_DRIVER;
  return STUB_FAILURE;
}
#if !defined(STUB_INCOMPLETE)
STUB_EXPORT int cuInit(unsigned) { return STUB_START; }
STUB_EXPORT int cuGetErrorName(int, const char** text) {
  *text = "CUDA_ERROR_STUB";
  return 0;
}
STUB_EXPORT int cuGetErrorString(int, const char** text) {
  *text = "as the test wants it";
  return 0;
}
STUB_EXPORT int cuDeviceGetCount(int* count) {
  *count = 1;
  return 0;
}
STUB_EXPORT int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}
STUB_EXPORT int cuDeviceGetName(char* name, int size, int) {
  std::strncpy(name, "Stub", static_cast<std::size_t>(size));
  return 0;
}
STUB_EXPORT int cuDeviceGetAttribute(int* value, int which, int) {
  *value = which == horoplug::cuda::kComputeCapabilityMajor ? 9 : 0;
  return 0;
}
STUB_EXPORT int cuDeviceTotalMem_v2(std::size_t* bytes, int) {
  *bytes = std::size_t{80} << 30;
  return 0;
}
#endif

#elif defined(STUB_NVRTC)

STUB_EXPORT int nvrtcVersion(int* major, int* minor) {
  *major = STUB_NVRTC / 1000;
  *minor = STUB_NVRTC % 1000 / 10;
  return STUB_FAILURE;
}
#if !defined(STUB_INCOMPLETE)
STUB_EXPORT int nvrtcGetNumSupportedArchs(int* count) {
  *count = 3;
  return 0;
}
STUB_EXPORT int nvrtcGetSupportedArchs(int* archs) {
  archs[0] = 90;
  archs[1] = 75;
  archs[2] = 80;
  return 0;
}
#endif

#elif defined(STUB_NCCL)

STUB_EXPORT int ncclGetVersion(int* version) {
  *version = STUB_NCCL;
  return STUB_FAILURE;
}

#endif

// NOLINTEND(readability-identifier-naming)

}  // extern "C"
