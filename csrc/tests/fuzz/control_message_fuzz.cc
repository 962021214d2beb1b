// Fuzz target: control messages. Whatever the bytes, decoding ends in a message or in a WireError,
// and a message that was decoded can be encoded again.
#include "harness/any_message.h"

using namespace horoplug;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    horoplug::testing::decode_any({reinterpret_cast<const std::byte*>(data), size});
  } catch (const WireError&) {
  }
  return 0;
}
