// Defines all functions of a library that cuda_libraries.cc does not define; they do nothing and
// return success. They are weak, so that the definitions of cuda_libraries.cc replace them, and in
// a separate file, because their types differ from those definitions.
#include "device/cuda/driver/driver.h"
#include "device/cuda/driver/nccl.h"
#include "device/cuda/driver/nvrtc.h"

#define STUB_FUNCTION(symbol) \
  extern "C" __attribute__((visibility("default"), weak)) int symbol() { return 0; }
#define STUB_CUDA(name, symbol, parameters) STUB_FUNCTION(symbol)
#define STUB_OF_NVRTC(name, parameters) STUB_FUNCTION(nvrtc##name)
#define STUB_OF_NCCL(name, parameters) STUB_FUNCTION(nccl##name)

#if defined(STUB_INCOMPLETE)
#elif defined(STUB_DRIVER)
HOROPLUG_CUDA_FUNCTIONS(STUB_CUDA)
#elif defined(STUB_NVRTC)
HOROPLUG_NVRTC_FUNCTIONS(STUB_OF_NVRTC)
#elif defined(STUB_NCCL)
HOROPLUG_NCCL_FUNCTIONS(STUB_OF_NCCL)
HOROPLUG_NCCL_TEXTS(STUB_OF_NCCL)
#endif
