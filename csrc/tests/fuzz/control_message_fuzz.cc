// Fuzz target: control messages. Whatever the bytes, decoding ends in a message or in a WireError,
// a message that was decoded can be encoded again, and the memory that this takes is bounded by a
// multiple of the message's length.
#include <malloc.h>

#include <cstdio>
#include <cstdlib>
#include <new>

#include "harness/any_message.h"

using namespace horoplug;

namespace {

constexpr std::size_t kConstant = 64 << 10;
constexpr std::size_t kFactor = 2048;

thread_local std::size_t used = 0;  // libFuzzer has threads of its own
thread_local std::size_t most_used = 0;

}  // namespace

void* operator new(std::size_t size) {
  void* const memory = std::malloc(size);
  if (memory == nullptr) throw std::bad_alloc();
  used += ::malloc_usable_size(memory);
  if (used > most_used) most_used = used;
  return memory;
}
void operator delete(void* memory) noexcept {
  if (memory != nullptr) used -= ::malloc_usable_size(memory);
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept { operator delete(memory); }

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::size_t before = used;
  most_used = used;
  try {
    horoplug::testing::decode_any({reinterpret_cast<const std::byte*>(data), size});
  } catch (const WireError&) {
  }
  if (most_used - before > kConstant + kFactor * size) {
    std::fprintf(stderr, "a message of %zu bytes took %zu bytes of memory\n", size,
                 most_used - before);
    std::abort();
  }
  return 0;
}
