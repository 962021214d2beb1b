// The control messages of send and recv. Each is about one send, which its sender has numbered.
#pragma once

#include "controller/messages.h"

namespace horoplug {

// From the sender to the receiver: a tensor is ready.
struct Offer {
  std::uint64_t send = 0;  // ascending among the sends of a rank
  std::int32_t tag = 0;
  DType dtype = DType::kUInt8;
  Shape shape;
};

// How one side ends a send without a transfer: the receiver that does not take it (kReject), or the
// sender that withdraws its offer (kCancel).
struct Refusal {
  std::uint64_t send = 0;
  hp_status code = HP_MISMATCH;
  std::string text;
};

Bytes encode(std::uint32_t set, const Offer& offer);
// The receiver has a place for the tensor: the transfer may begin.
Bytes encode_accept(std::uint64_t send);
// `kind`: kReject or kCancel.
Bytes encode(MessageKind kind, std::uint32_t set, const Refusal& refusal);

Offer decode_offer(Reader& reader);
std::uint64_t decode_accept(Reader& reader);
Refusal decode_refusal(Reader& reader);

}  // namespace horoplug
