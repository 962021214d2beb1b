// Copying. Compiled once per instruction set, see kernels_vector.h for what that demands of this
// code.
//
// What one core writes here another one reads. "rep movsb", where the processor says that it is
// fast, takes over whole lines without reading them first, which makes the way between two cores
// that share no cache more than twice as fast as vectors do, and is no slower between those that
// share one. libc's memcpy uses it only between sizes that suit a single core.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/cpu/kernels_vector.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace horoplug {
namespace {

using Bytes = Vector<std::uint8_t>;
constexpr std::size_t kCopyStep = 4 * kVectorBytes;

HP_INLINE void copy_tail(char* to, const char* from, std::size_t bytes) {
  if (bytes != 0) __builtin_memcpy(to, from, bytes);
}

inline void copy(void* dst, const void* src, std::size_t bytes) {
  char* to = static_cast<char*>(dst);
  const char* from = static_cast<const char*>(src);
  for (; bytes >= kCopyStep; bytes -= kCopyStep, to += kCopyStep, from += kCopyStep) {
    Bytes v[4];
#pragma GCC unroll 4
    for (std::size_t i = 0; i < 4; ++i) v[i] = load_vector<Bytes>(from + i * kVectorBytes);
#pragma GCC unroll 4
    for (std::size_t i = 0; i < 4; ++i) store_vector(to + i * kVectorBytes, v[i]);
    // Lest the compiler sees through it and calls memcpy.
    asm volatile("" : "+r"(to), "+r"(from));
  }
  copy_tail(to, from, bytes);
}

#if defined(__x86_64__)

// Shorter ones are done before the processor has set itself up for this.
constexpr std::size_t kRepeatFrom = 1024;

inline void copy_repeated(void* dst, const void* src, std::size_t bytes) {
  if (bytes < kRepeatFrom) return copy(dst, src, bytes);
  asm volatile("rep movsb" : "+D"(dst), "+S"(src), "+c"(bytes) : : "memory");
}

HP_INLINE void store_past_caches(char* to, Bytes v) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), (__m512i)v);
#elif defined(__AVX2__)
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)v);
#else
  _mm_stream_si128(reinterpret_cast<__m128i*>(to), (__m128i)v);
#endif
}

inline void stream(void* dst, const void* src, std::size_t bytes) {
  char* to = static_cast<char*>(dst);
  const char* from = static_cast<const char*>(src);
  const std::size_t before = (64 - reinterpret_cast<std::uintptr_t>(to) % 64) % 64;
  if (bytes < before + kCopyStep) return copy(dst, src, bytes);
  copy_tail(to, from, before);
  to += before, from += before, bytes -= before;
  for (; bytes >= kCopyStep; bytes -= kCopyStep, to += kCopyStep, from += kCopyStep) {
    Bytes v[4];
#pragma GCC unroll 4
    for (std::size_t i = 0; i < 4; ++i) v[i] = load_vector<Bytes>(from + i * kVectorBytes);
#pragma GCC unroll 4
    for (std::size_t i = 0; i < 4; ++i) store_past_caches(to + i * kVectorBytes, v[i]);
  }
  _mm_sfence();
  copy_tail(to, from, bytes);
}

#else

inline void copy_repeated(void* dst, const void* src, std::size_t bytes) { copy(dst, src, bytes); }
inline void stream(void* dst, const void* src, std::size_t bytes) { copy(dst, src, bytes); }

#endif

}  // namespace
}  // namespace horoplug
