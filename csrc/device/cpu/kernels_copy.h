// Copying. Compiled once per instruction set, see kernels_vector.h for the rules of such code.
//
// Data that one core writes here is read by another core. Where the processor reports that "rep
// movsb" is fast, it writes whole cache lines without reading them first. Between cores that share
// no cache this is more than twice as fast as vector instructions, and between cores that share one
// it is no slower. libc's memcpy uses it only for sizes that suit a single core.
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
    // Keeps the compiler from replacing the loop by a call of memcpy.
    asm volatile("" : "+r"(to), "+r"(from));
  }
  copy_tail(to, from, bytes);
}

#if defined(__x86_64__)

// For fewer bytes the start-up of the instruction costs more than the copy.
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
