// Fuzz target for control messages. Decoding arbitrary bytes gives a message or a WireError, a
// decoded message can be encoded again, and the memory that both take is bounded by a multiple of
// the message's length plus a constant.
#include <sanitizer/allocator_interface.h>

#include <cstdio>
#include <cstdlib>

#include "harness/any_message.h"

using namespace horoplug;

namespace {

constexpr std::size_t kConstant = 64 << 10;
constexpr std::size_t kFactor = 2048;

thread_local std::size_t used = 0;  // thread-local, because libFuzzer's own threads allocate too
thread_local std::size_t most_used = 0;

void count_allocation(const volatile void*, std::size_t size) {
  used += size;
  if (used > most_used) most_used = used;
}

void count_release(const volatile void* memory) {
  if (memory != nullptr) used -= __sanitizer_get_allocated_size(memory);
}

[[maybe_unused]] const int hooks =
    __sanitizer_install_malloc_and_free_hooks(count_allocation, count_release);

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::size_t before = used;
  most_used = used;
  const std::span bytes(reinterpret_cast<const std::byte*>(data), size);
  try {
    horoplug::testing::decode_any(bytes);
  } catch (const WireError&) {
  }
  if (most_used - before > kConstant + kFactor * size) {
    std::fprintf(stderr, "a message of %zu bytes took %zu bytes of memory\n", size,
                 most_used - before);
    std::abort();
  }
  return 0;
}
