// What differs between the compilers of the kernels: nvcc and NVRTC for the GPU, and the host's
// for tests, which run the same source block by block.
//
// A kernel is written for a block: each(f) runs f for every thread of it, and sync() separates what
// threads write from what others read. On the GPU each thread runs its own f; on the host they run
// one after the other, in an order that a test chooses.
#pragma once

#include "device/cuda/kernels/tables.h"

#if defined(__CUDACC__)

#define HP_DEVICE __device__ __forceinline__
#define HP_UNROLL _Pragma("unroll")

namespace horoplug::cuda {

struct Block {
  HP_DEVICE u32 index() const { return blockIdx.x; }
  HP_DEVICE u32 count() const { return gridDim.x; }
  template <class Run>
  HP_DEVICE void each(Run run) const {
    run(threadIdx.x);
  }
  HP_DEVICE void sync() const { __syncthreads(); }
};

struct Vector16 {
  uint4 bits;
};
HP_DEVICE Vector16 load16(const void* from) { return {*static_cast<const uint4*>(from)}; }
HP_DEVICE void store16(void* to, Vector16 v) { *static_cast<uint4*>(to) = v.bits; }

// Not every GPU has the other direction for bfloat16, which is a few shifts anyway.
HP_DEVICE float widen_f16(u16 h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
}
HP_DEVICE u16 narrow_f16(float f) {
  u16 h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}

}  // namespace horoplug::cuda

#else

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define HP_DEVICE inline
#define HP_UNROLL

namespace horoplug::cuda {

class Block {
 public:
  // `order` chooses the order of the threads.
  Block(u32 index, u32 count, u32 order) : index_(index), count_(count), order_(order) {}
  u32 index() const { return index_; }
  u32 count() const { return count_; }
  template <class Run>
  void each(Run run) const {
    for (u32 i = 0; i < kThreads; ++i) run((i * (2 * order_ + 1) + order_ / 2) % kThreads);
  }
  void sync() const {}

 private:
  u32 index_, count_, order_;
};

struct Vector16 {
  u8 bytes[16];
};
inline void check_aligned(const void* address) {
  if (reinterpret_cast<uintptr_t>(address) % 16 == 0) return;
  fprintf(stderr, "a vector access that is not aligned: %p\n", address);
  abort();
}
inline Vector16 load16(const void* from) {
  check_aligned(from);
  Vector16 v;
  memcpy(&v, from, 16);
  return v;
}
inline void store16(void* to, Vector16 v) {
  check_aligned(to);
  memcpy(to, &v, 16);
}

// Numbers only; NaNs are the caller's.
inline float widen_f16(u16 h) {
  const u32 exponent = (h >> 10) & 31, mantissa = h & 0x3ff, sign = (h & 0x8000u) << 16;
  float f = static_cast<float>(mantissa) * 0x1p-24f;
  u32 bits;
  memcpy(&bits, &f, 4);
  if (exponent == 31) bits = 0x7f800000 | mantissa << 13;
  if (exponent > 0 && exponent < 31) bits = (exponent + 112) << 23 | mantissa << 13;
  bits |= sign;
  memcpy(&f, &bits, 4);
  return f;
}
inline u16 narrow_f16(float f) {
  u32 bits;
  memcpy(&bits, &f, 4);
  const u32 sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  u32 result = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  if (magnitude < 0x38800000) {  // below 2^-14: the addition rounds to subnormals
    float small;
    memcpy(&small, &magnitude, 4);
    small += 0.5f;
    memcpy(&result, &small, 4);
    result -= 0x3f000000;
  }
  if (magnitude >= 0x477ff000) result = 0x7c00;  // 65520, the least that becomes infinite
  return static_cast<u16>(result | sign);
}

}  // namespace horoplug::cuda

#endif
