// The messages between ranks that are about the job: the handshake, stall inspections, failures,
// and whether a rank is alive.
#include "controller/message_fields.h"
#include "controller/messages.h"

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

Bytes encode_inspection_request() { return begin_message(MessageKind::kInspectionRequest).take(); }

Bytes encode_inspection(std::uint64_t inspection) {
  Writer writer = begin_message(MessageKind::kInspection);
  writer.put_varint(inspection);
  return writer.take();
}

std::uint64_t decode_inspection(Reader& reader) {
  const std::uint64_t inspection = reader.get_varint();
  reader.expect_end();
  return inspection;
}

Bytes encode(const Report& report) {
  Writer writer = begin_message(MessageKind::kReport);
  writer.put_varint(report.inspection);
  writer.put_varint(report.ranks.size());
  for (const RankReport& rank : report.ranks) {
    writer.put_varint(static_cast<std::uint64_t>(rank.rank));
    writer.put(rank.quiet);
    writer.put(static_cast<std::uint8_t>(rank.executing));
    writer.put_varint(rank.busy_threads);
    writer.put_varint(rank.pending.size());
    for (const auto& pending : rank.pending) {
      writer.put_varint(pending.set);
      writer.put_string(pending.name);
      writer.put(pending.age);
      // Bit 0: a thread waits for it. Bit 1: it is a join. Bit 2: it waits for one rank, which
      // follows.
      writer.put(static_cast<std::uint8_t>((pending.waited ? 1 : 0) | (pending.join ? 2 : 0) |
                                           (pending.peer >= 0 ? 4 : 0)));
      if (pending.peer >= 0) writer.put_varint(static_cast<std::uint64_t>(pending.peer));
    }
  }
  return writer.take();
}

Report decode_report(Reader& reader) {
  Report report;
  report.inspection = reader.get_varint();
  report.ranks.resize(reader.get_count(12));
  for (RankReport& rank : report.ranks) {
    rank.rank = reader.get_int(kMaxRank);
    rank.quiet = get_seconds(reader);
    rank.executing = get_bool(reader);
    rank.busy_threads = get_u32(reader);
    rank.pending.resize(reader.get_count(11));
    for (auto& pending : rank.pending) {
      pending.set = get_u32(reader);
      pending.name = reader.get_string();
      pending.age = get_seconds(reader);
      const auto flags = reader.get<std::uint8_t>();
      if (flags > 7) throw WireError("unknown flags");
      pending.waited = (flags & 1) != 0;
      pending.join = (flags & 2) != 0;
      if ((flags & 4) != 0) pending.peer = reader.get_int(kMaxRank);
    }
  }
  reader.expect_end();
  return report;
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

Bytes encode_wake_up() { return begin_message(MessageKind::kWakeUp).take(); }
Bytes encode_ping() { return begin_message(MessageKind::kPing).take(); }
Bytes encode_pong() { return begin_message(MessageKind::kPong).take(); }

Bytes encode_bye() { return begin_message(MessageKind::kBye).take(); }

}  // namespace horoplug
