// Fuzz target: control messages. Whatever the bytes, decoding ends in a message or in a WireError,
// and a message that was decoded can be encoded again.
#include "engine/messages.h"

using namespace horoplug;

namespace {

void decode(std::span<const std::byte> bytes) {
  Reader reader(bytes);
  const MessageHead head = read_head(reader);
  switch (head.kind) {
    case MessageKind::kHello:
      encode(decode_hello(reader));
      break;
    case MessageKind::kReady:
      encode(head.set, decode_ready(reader));
      break;
    case MessageKind::kDecisions:
      encode(head.set, decode_decisions(reader));
      break;
    case MessageKind::kLeave:
      decode_leave(reader);
      break;
    case MessageKind::kCensus:
      decode_census(reader);
      break;
    case MessageKind::kReport:
      encode(decode_report(reader));
      break;
    case MessageKind::kAbort:
      encode(decode_abort(reader));
      break;
    case MessageKind::kCensusRequest:
    case MessageKind::kBye:
      reader.expect_end();
      break;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    decode({reinterpret_cast<const std::byte*>(data), size});
  } catch (const WireError&) {
  }
  return 0;
}
