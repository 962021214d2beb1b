// The messages that negotiate operations and end plans. Decisions are in decision_messages.cc, and
// messages about the job and its failures in job_messages.cc.
#include "controller/messages/messages.h"

#include "controller/messages/message_fields.h"

namespace horoplug {

MessageHead read_head(Reader& reader) {
  const auto kind = reader.get_enum<MessageKind>(kMessageKindCount);
  return {kind, get_u32(reader)};
}

Bytes encode(std::uint32_t set, const Ready& ready) {
  Writer writer = begin_message(MessageKind::kReady, set);
  writer.put_varint(ready.agreement);
  put_bits(writer, ready.ids);
  writer.put_varint(ready.requests.size());
  Series series;
  for (const Request& request : ready.requests) {
    series.put_name(writer, request.name);
    writer.put_varint(request.variants.size());
    for (const Variant& variant : request.variants) {
      series.put(writer, variant.signature);
      series.put_ranks(writer, variant.ranks);
    }
  }
  return writer.take();
}

Ready decode_ready(Reader& reader) {
  Ready ready;
  ready.agreement = get_u32(reader);
  ready.ids = get_bits(reader);
  ready.requests.resize(reader.get_count(2));
  Series series;
  for (Request& request : ready.requests) {
    request.name = series.get_name(reader);
    request.variants.resize(reader.get_count(1));
    if (request.variants.empty()) throw WireError("readiness request without variants");
    for (Variant& variant : request.variants) {
      variant.signature = series.get(reader);
      variant.ranks = series.get_ranks(reader);
      if (variant.ranks.empty() && request.variants.size() > 1) {
        throw WireError("variants without ranks");
      }
    }
  }
  reader.expect_end();
  return ready;
}

Bytes encode_leave(std::uint32_t set, int rank) {
  Writer writer = begin_message(MessageKind::kLeave, set);
  put_leaver(writer, rank);
  return writer.take();
}

int decode_leave(Reader& reader) {
  const int rank = get_leaver(reader);
  reader.expect_end();
  return rank;
}

Bytes encode_join(std::uint32_t set, std::uint32_t agreement, int rank) {
  Writer writer = begin_message(MessageKind::kJoin, set);
  writer.put_varint(agreement);
  writer.put_varint(static_cast<std::uint64_t>(rank));
  return writer.take();
}

Joined decode_join(Reader& reader) {
  Joined joined{get_u32(reader), reader.get_int(kMaxRank)};
  reader.expect_end();
  return joined;
}

Bytes encode(std::uint32_t set, const DependencyLabels& labels) {
  Writer writer = begin_message(MessageKind::kDependencyLabels, set);
  writer.put_varint(labels.query);
  put_numbers(writer, labels.labels);
  return writer.take();
}

DependencyLabels decode_dependency_labels(Reader& reader) {
  DependencyLabels labels;
  labels.query = reader.get_varint();
  labels.labels = get_numbers(reader);
  reader.expect_end();
  return labels;
}

Bytes encode(MessageKind kind, std::uint32_t set, const PlanNotice& notice) {
  Writer writer = begin_message(kind, set);
  writer.put_varint(notice.epoch);
  writer.put_varint(notice.batch);
  return writer.take();
}

PlanNotice decode_plan_notice(Reader& reader) {
  PlanNotice notice;
  notice.epoch = get_u32(reader);
  notice.batch = reader.get_varint();
  reader.expect_end();
  return notice;
}

}  // namespace horoplug
