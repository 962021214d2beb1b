// The messages of stall inspections.
#include "controller/messages/message_fields.h"
#include "controller/messages/messages.h"

namespace horoplug {
namespace {

void put_key(Writer& writer, const OperationKey& key) {
  writer.put_varint(key.set);
  writer.put_string(key.name);
  writer.put_string(key.group);
}

OperationKey get_key(Reader& reader) {
  OperationKey key;
  key.set = get_u32(reader);
  key.name = reader.get_string();
  key.group = reader.get_string();
  return key;
}

// At most as many items as an inspection may name.
template <typename Item, typename Read>
std::vector<Item> get_operations(Reader& reader, std::size_t least, Read read) {
  const std::size_t count = reader.get_count(least);
  if (count > Report::kMostOperations) throw WireError("too many operations");
  std::vector<Item> items;
  items.reserve(count);
  for (std::size_t i = 0; i < count; ++i) items.push_back(read());
  return items;
}

void put_numbered_ranges(Writer& writer, const std::map<std::uint32_t, RankRanges>& ranks) {
  writer.put_varint(ranks.size());
  for (const auto& [number, with] : ranks) {
    writer.put_varint(number);
    put_ranges(writer, with);
  }
}

std::map<std::uint32_t, RankRanges> get_numbered_ranges(Reader& reader) {
  std::map<std::uint32_t, RankRanges> ranks;
  for (std::size_t left = reader.get_count(2); left > 0; --left) {
    const std::uint32_t number = get_u32(reader);
    ranks[number].add(get_ranges(reader));
  }
  return ranks;
}

}  // namespace

Bytes encode(const InspectionRequest& request) {
  Writer writer = begin_message(MessageKind::kInspectionRequest);
  writer.put(request.age.count());
  writer.put(static_cast<std::uint8_t>(request.for_groups));
  return writer.take();
}

InspectionRequest decode_inspection_request(Reader& reader) {
  InspectionRequest request;
  request.age = get_seconds(reader);
  request.for_groups = get_bool(reader);
  reader.expect_end();
  return request;
}

Bytes encode(const InspectionQuestion& question) {
  Writer writer = begin_message(MessageKind::kInspection);
  writer.put_varint(question.number);
  writer.put(question.quiet.count());
  writer.put(static_cast<std::uint8_t>(question.is_second));
  writer.put_varint(question.operations.size());
  for (const OperationKey& key : question.operations) put_key(writer, key);
  return writer.take();
}

InspectionQuestion decode_inspection(Reader& reader) {
  InspectionQuestion question;
  question.number = reader.get_varint();
  question.quiet = get_seconds(reader);
  question.is_second = get_bool(reader);
  question.operations = get_operations<OperationKey>(reader, 3, [&] { return get_key(reader); });
  reader.expect_end();
  return question;
}

Bytes encode(const Report& report) {
  Writer writer = begin_message(MessageKind::kReport);
  writer.put_varint(report.question);
  writer.put_varint(report.ranks);
  writer.put_varint(report.pending.size());
  for (const auto& pending : report.pending) {
    put_key(writer, pending.key);
    writer.put(pending.age.count());
    // Bit 0: it is a join. Bit 1: it waits for one rank, which follows. That it belongs to another
    // group is a part of the key.
    writer.put(static_cast<std::uint8_t>((pending.join ? 1 : 0) | (pending.peer >= 0 ? 2 : 0)));
    if (pending.peer >= 0) writer.put_varint(static_cast<std::uint64_t>(pending.peer));
    put_ranges(writer, pending.submitted);
    put_ranges(writer, pending.waiting);
    if (!pending.key.group.empty()) put_ranges(writer, pending.members);
  }
  put_ranges(writer, report.quiet);
  put_ranges(writer, report.waiting_for_unnamed);
  put_numbered_ranges(writer, report.joined);
  put_numbered_ranges(writer, report.busy_threads);
  return writer.take();
}

Report decode_report(Reader& reader) {
  Report report;
  report.question = reader.get_varint();
  report.ranks = get_u32(reader);
  report.pending = get_operations<Report::Pending>(reader, 14, [&] {
    Report::Pending pending;
    pending.key = get_key(reader);
    pending.age = get_seconds(reader);
    const auto flags = reader.get<std::uint8_t>();
    if (flags > 3) throw WireError("unknown flags");
    pending.join = (flags & 1) != 0;
    if ((flags & 2) != 0) pending.peer = reader.get_int(kMaxRank);
    pending.submitted = get_ranges(reader);
    pending.waiting = get_ranges(reader);
    if (!pending.key.group.empty()) pending.members = get_ranges(reader);
    return pending;
  });
  report.quiet = get_ranges(reader);
  report.waiting_for_unnamed = get_ranges(reader);
  report.joined = get_numbered_ranges(reader);
  report.busy_threads = get_numbered_ranges(reader);
  reader.expect_end();
  return report;
}

Bytes encode(const CallOff& call_off) {
  Writer writer = begin_message(MessageKind::kCallOff);
  put_key(writer, call_off.operation);
  writer.put_varint(call_off.failure.code);
  writer.put_string(call_off.failure.text);
  return writer.take();
}

CallOff decode_call_off(Reader& reader) {
  CallOff call_off;
  call_off.operation = get_key(reader);
  call_off.failure.code = get_failure(reader);
  call_off.failure.text = reader.get_string();
  reader.expect_end();
  return call_off;
}

}  // namespace horoplug
