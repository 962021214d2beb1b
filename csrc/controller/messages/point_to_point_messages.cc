#include "controller/messages/point_to_point_messages.h"

#include <limits>

namespace horoplug {
namespace {

Writer begin(MessageKind kind, std::uint32_t set, std::uint64_t send) {
  Writer writer;
  writer.put(kind);
  writer.put_varint(set);
  writer.put_varint(send);
  return writer;
}

}  // namespace

Bytes encode(std::uint32_t set, const Offer& offer) {
  Writer writer = begin(MessageKind::kOffer, set, offer.send);
  writer.put_varint(static_cast<std::uint64_t>(offer.tag));
  writer.put(offer.dtype);
  writer.put_varint(offer.shape.size());
  for (const std::int64_t dimension : offer.shape) {
    writer.put_varint(static_cast<std::uint64_t>(dimension));
  }
  writer.put(offer.source);
  if (offer.source == Offer::Source::kInline) writer.put_bytes(offer.data);
  return writer.take();
}

Offer decode_offer(Reader& reader) {
  Offer offer;
  offer.send = reader.get_varint();
  offer.tag = reader.get_int(std::numeric_limits<std::int32_t>::max());
  offer.dtype = reader.get_enum<DType>(kDTypeCount);
  offer.shape.resize(reader.get_count(1));
  for (std::int64_t& dimension : offer.shape) {
    const std::uint64_t value = reader.get_varint();
    if (value > std::numeric_limits<std::int64_t>::max()) throw WireError("dimension too large");
    dimension = static_cast<std::int64_t>(value);
  }
  offer.source = reader.get_enum<Offer::Source>(Offer::kSourceCount);
  if (offer.source == Offer::Source::kInline) offer.data = reader.get_bytes();
  reader.expect_end();
  return offer;
}

Bytes encode(const Accept& accept) {
  Writer writer = begin(MessageKind::kAccept, 0, accept.send);
  writer.put_varint(accept.slots.size());
  for (const std::uint32_t slot : accept.slots) writer.put_varint(slot);
  return writer.take();
}

Accept decode_accept(Reader& reader) {
  Accept accept;
  accept.send = reader.get_varint();
  accept.slots.resize(reader.get_count(1));
  for (std::uint32_t& slot : accept.slots) {
    slot = static_cast<std::uint32_t>(reader.get_int(std::numeric_limits<std::int32_t>::max()));
  }
  reader.expect_end();
  return accept;
}

Bytes encode(MessageKind kind, std::uint32_t set, const Refusal& refusal) {
  Writer writer = begin(kind, set, refusal.send);
  writer.put_varint(static_cast<std::uint64_t>(refusal.code));
  writer.put_string(refusal.text);
  return writer.take();
}

Refusal decode_refusal(Reader& reader) {
  Refusal refusal;
  refusal.send = reader.get_varint();
  refusal.code = static_cast<hp_status>(reader.get_int(HP_INTERNAL));
  refusal.text = reader.get_string();
  reader.expect_end();
  return refusal;
}

}  // namespace horoplug
