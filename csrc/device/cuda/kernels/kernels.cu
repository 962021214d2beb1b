// The kernels as CUDA sees them. All of them, or with -DHP_ONLY=... (see source.h) a single one,
// which NVRTC compiles in a fraction of the time.
#include "device/cuda/kernels/adasum.h"
#include "device/cuda/kernels/move.h"
#include "device/cuda/kernels/reduce.h"

#define HP_KERNEL(...) extern "C" __global__ void __launch_bounds__(__VA_ARGS__)

// Four blocks on a multiprocessor allow 64 registers; left alone, ptxas takes 32 and spills one.
#define HP_MOVE(name, From, To)                                        \
  HP_KERNEL(kThreads, 4) name(const __grid_constant__ MoveArgs args) { \
    Move<From, To>::run(Block{}, args);                                \
  }
#define HP_REDUCE(name, Element, Op)                                  \
  HP_KERNEL(kThreads) name(const __grid_constant__ ReduceArgs args) { \
    Reduce<Element, Op>::run(Block{}, args);                          \
  }
#define HP_DOTS(name, Element)                                      \
  HP_KERNEL(kThreads) name(const __grid_constant__ DotsArgs args) { \
    __shared__ Dots scratch[kThreads];                              \
    DotsOf<Element>::run(Block{}, args, scratch);                   \
  }
#define HP_SUM(name)                                               \
  HP_KERNEL(kThreads) name(const __grid_constant__ SumArgs args) { \
    __shared__ Dots scratch[kThreads];                             \
    SumOfTiles::run(Block{}, args, scratch);                       \
  }
#define HP_BLEND(name, From, To)                                     \
  HP_KERNEL(kThreads) name(const __grid_constant__ BlendArgs args) { \
    Blend<From, To>::run(Block{}, args);                             \
  }

namespace horoplug::cuda {

#if defined(HP_ONLY)
HP_ONLY
#else
#include "device/cuda/kernels/list.def"
#endif

}  // namespace horoplug::cuda
