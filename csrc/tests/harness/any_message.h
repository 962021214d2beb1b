// Decodes any kind of control message, and encodes the result again.
#pragma once

#include "controller/messages/messages.h"
#include "controller/messages/point_to_point_messages.h"

namespace horoplug::testing {

template <typename Message>
Bytes decode_and_encode(const MessageHead& head, Reader& reader) {
  return encode(head.kind, head.set, decode<Message>(reader));
}

// Throws WireError if the bytes are not a valid message.
inline Bytes decode_any(std::span<const std::byte> bytes) {
  Reader reader(bytes);
  const MessageHead head = read_head(reader);
  switch (head.kind) {
    case MessageKind::kHello:
      return decode_and_encode<Hello>(head, reader);
    case MessageKind::kReady:
      return decode_and_encode<Ready>(head, reader);
    case MessageKind::kDecisions:
      return decode_and_encode<Decisions>(head, reader);
    case MessageKind::kLeave:
      return decode_and_encode<Leave>(head, reader);
    case MessageKind::kJoin:
      return decode_and_encode<Joined>(head, reader);
    case MessageKind::kInspection:
      return decode_and_encode<InspectionQuestion>(head, reader);
    case MessageKind::kReport:
      return decode_and_encode<Report>(head, reader);
    case MessageKind::kFail:
    case MessageKind::kAbort:
      return decode_and_encode<Abort>(head, reader);
    case MessageKind::kDependencyLabels:
      return decode_and_encode<DependencyLabels>(head, reader);
    case MessageKind::kBreak:
    case MessageKind::kHalt:
    case MessageKind::kHalted:
      return decode_and_encode<PlanNotice>(head, reader);
    case MessageKind::kOffer:
      return decode_and_encode<Offer>(head, reader);
    case MessageKind::kAccept:
      return decode_and_encode<Accept>(head, reader);
    case MessageKind::kReject:
    case MessageKind::kCancel:
      return decode_and_encode<Refusal>(head, reader);
    case MessageKind::kInspectionRequest:
      return decode_and_encode<InspectionRequest>(head, reader);
    case MessageKind::kCallOff:
      return decode_and_encode<CallOff>(head, reader);
    case MessageKind::kIntroduced:
    case MessageKind::kBye:
    case MessageKind::kWakeUp:
    case MessageKind::kPing:
    case MessageKind::kPong:
      reader.expect_end();
      return encode(head.kind);
  }
  throw WireError("unknown kind");
}

}  // namespace horoplug::testing
