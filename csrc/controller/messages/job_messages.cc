// The messages between ranks that are about the job: the handshake, stall inspections, failures,
// and whether a rank is alive.
#include "controller/messages/message_fields.h"
#include "controller/messages/messages.h"

namespace horoplug {

Bytes encode(const Hello& hello) {
  Writer writer = begin_message(MessageKind::kHello);
  writer.put(hello.protocol);
  writer.put(hello.rank);
  writer.put(hello.size);
  writer.put(hello.segment_bytes);
  writer.put_varint(hello.settings.size());
  for (const auto& [name, value] : hello.settings) {
    writer.put_string(name);
    writer.put_string(value);
  }
  return writer.take();
}

Hello decode_hello(Reader& reader) {
  Hello hello;
  hello.protocol = reader.get<std::uint32_t>();
  // Fields that another version of the protocol appends are ignored.
  if (hello.protocol != Hello::kProtocol) return hello;
  hello.rank = reader.get<std::int32_t>();
  hello.size = reader.get<std::int32_t>();
  hello.segment_bytes = reader.get<std::uint64_t>();
  hello.settings.resize(reader.get_count(2));
  for (auto& [name, value] : hello.settings) {
    name = reader.get_string();
    value = reader.get_string();
  }
  reader.expect_end();
  return hello;
}

namespace {

Bytes encode_failure(MessageKind kind, std::uint32_t set, const Abort& failure) {
  Writer writer = begin_message(kind, set);
  writer.put_varint(failure.code);
  writer.put_string(failure.text);
  return writer.take();
}

}  // namespace

Bytes encode(const Abort& abort) { return encode_failure(MessageKind::kAbort, 0, abort); }

Bytes encode_fail(std::uint32_t set, const Abort& failure) {
  return encode_failure(MessageKind::kFail, set, failure);
}

Abort decode_abort(Reader& reader) {
  Abort abort;
  abort.code = get_failure(reader);
  abort.text = reader.get_string();
  reader.expect_end();
  return abort;
}

Bytes encode_introduced() { return begin_message(MessageKind::kIntroduced).take(); }

Bytes encode_wake_up() { return begin_message(MessageKind::kWakeUp).take(); }
Bytes encode_ping() { return begin_message(MessageKind::kPing).take(); }
Bytes encode_pong() { return begin_message(MessageKind::kPong).take(); }

Bytes encode_bye() { return begin_message(MessageKind::kBye).take(); }

}  // namespace horoplug
