// Decodes any kind of control message, and encodes the result again if the kind has contents.
#pragma once

#include "controller/messages/messages.h"
#include "controller/messages/point_to_point_messages.h"

namespace horoplug::testing {

// Throws WireError if the bytes are not a valid message.
inline void decode_any(std::span<const std::byte> bytes) {
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
      encode_leave(head.set, decode_leave(reader));
      break;
    case MessageKind::kJoin: {
      const Joined joined = decode_join(reader);
      encode_join(head.set, joined.agreement, joined.rank);
      break;
    }
    case MessageKind::kInspection:
      encode(decode_inspection(reader));
      break;
    case MessageKind::kReport:
      encode(decode_report(reader));
      break;
    case MessageKind::kFail:
      encode_fail(head.set, decode_abort(reader));
      break;
    case MessageKind::kAbort:
      encode(decode_abort(reader));
      break;
    case MessageKind::kDependencyLabels:
      encode(head.set, decode_dependency_labels(reader));
      break;
    case MessageKind::kBreak:
    case MessageKind::kHalt:
    case MessageKind::kHalted:
      encode(head.kind, head.set, decode_plan_notice(reader));
      break;
    case MessageKind::kOffer:
      encode(head.set, decode_offer(reader));
      break;
    case MessageKind::kAccept:
      encode(decode_accept(reader));
      break;
    case MessageKind::kReject:
    case MessageKind::kCancel:
      encode(head.kind, head.set, decode_refusal(reader));
      break;
    case MessageKind::kInspectionRequest:
      encode(decode_inspection_request(reader));
      break;
    case MessageKind::kCallOff:
      encode(decode_call_off(reader));
      break;
    case MessageKind::kIntroduced:
    case MessageKind::kBye:
    case MessageKind::kWakeUp:
    case MessageKind::kPing:
    case MessageKind::kPong:
      reader.expect_end();
      break;
  }
}

}  // namespace horoplug::testing
