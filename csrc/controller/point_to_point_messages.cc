#include "controller/point_to_point_messages.h"

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
  reader.expect_end();
  return offer;
}

Bytes encode_accept(std::uint64_t send) { return begin(MessageKind::kAccept, 0, send).take(); }

std::uint64_t decode_accept(Reader& reader) {
  const std::uint64_t send = reader.get_varint();
  reader.expect_end();
  return send;
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
