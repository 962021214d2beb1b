#include "engine/message_dispatcher.h"

#include <string>

namespace horoplug {
namespace {

// Messages that are kept for one process set. A peer can be ahead by no more than what it says
// before it waits for this rank.
constexpr std::size_t kMaxEarly = 1 << 16;

}  // namespace

void MessageDispatcher::receive(int from, Bytes message) {
  if (!lifecycle_.starting()) return dispatch(from, message);
  Reader reader(message);
  const MessageHead head = read_head(reader);
  if (head.kind == MessageKind::kHello) {
    handshake_.receive(from, decode<Hello>(reader));
  } else if (head.kind == MessageKind::kIntroduced) {
    reader.expect_end();
    handshake_.receive_introduced(from);
  } else if (head.kind == MessageKind::kAbort || head.kind == MessageKind::kBye) {
    // A peer may be ready, done and gone before this rank has heard from everybody.
    dispatch(from, message);
  } else {
    early_.emplace_back(from, std::move(message));
  }
}

void MessageDispatcher::deliver_early() { deliver(std::exchange(early_, {})); }

void MessageDispatcher::deliver_early(std::uint32_t set) {
  const auto found = early_by_set_.find(set);
  if (found == early_by_set_.end()) return;
  const Kept messages = std::move(found->second);
  early_by_set_.erase(found);
  if (registry_.find(set) != nullptr) deliver(messages);
}

// A malformed message fails its link here: the link that delivered it has finished with it.
void MessageDispatcher::deliver(const Kept& messages) {
  for (const auto& [from, message] : messages) {
    try {
      dispatch(from, message);
    } catch (const WireError& error) {
      mesh_.link(from)->fail(std::string("it sent a malformed message: ") + error.what());
    }
  }
}

// nullptr: the message is kept, or has no use any more.
ProcessSet* MessageDispatcher::set_of(std::uint32_t number, int from,
                                      std::span<const std::byte> message) {
  if (ProcessSet* const set = registry_.find(number)) {
    if (set->members()->index_of(from) < 0) {
      throw WireError("it is not in process set " + std::to_string(number));
    }
    return set;
  }
  if (number > registry_.last_number()) {
    auto& early = early_by_set_[number];
    if (early.size() >= kMaxEarly) throw WireError("an unknown process set");
    early.emplace_back(from, Bytes(message.begin(), message.end()));
  }
  return nullptr;
}

void MessageDispatcher::dispatch(int from, std::span<const std::byte> message) {
  Reader reader(message);
  const MessageHead head = read_head(reader);
  switch (head.kind) {
    case MessageKind::kHello:
    case MessageKind::kIntroduced:
      throw WireError("it introduced itself twice");
    case MessageKind::kReady:
      if (ProcessSet* const set = set_of(head.set, from, message)) {
        const auto ready = decode<Ready>(reader);
        set->receive(from, ready);
        tracing_.ready(*set, from, ready);
      }
      break;
    case MessageKind::kDecisions:
    case MessageKind::kLeave:
    case MessageKind::kJoin:
    case MessageKind::kDependencyLabels:
    case MessageKind::kBreak:
    case MessageKind::kHalt:
    case MessageKind::kHalted:
      if (ProcessSet* const set = set_of(head.set, from, message)) {
        set->receive(from, head.kind, reader);
      }
      break;
    case MessageKind::kFail: {
      ProcessSet* const set = registry_.find(head.set);
      const Abort failure = decode<Abort>(reader);
      if (set == nullptr) break;  // it was removed meanwhile
      if (!set->negotiator().is_root()) throw WireError("this rank is not the set's root");
      set->fail_all({failure.code, failure.text});
      break;
    }
    case MessageKind::kInspectionRequest:
      stalls_.receive(decode<InspectionRequest>(reader));
      break;
    case MessageKind::kInspection:
      stalls_.receive(from, decode<InspectionQuestion>(reader));
      break;
    case MessageKind::kReport:
      stalls_.receive(from, decode<Report>(reader));
      break;
    case MessageKind::kCallOff:
      stalls_.receive(decode<CallOff>(reader));
      break;
    case MessageKind::kWakeUp:
      reader.expect_end();
      mesh_.look_at_polled();
      break;
    case MessageKind::kPing:
      reader.expect_end();
      mesh_.send_control(from, encode(MessageKind::kPong));
      break;
    case MessageKind::kPong:
      reader.expect_end();
      suspicion_.receive_pong(from);
      break;
    case MessageKind::kOffer:
    case MessageKind::kCancel:
      dispatch_offer(from, head, reader, message);
      break;
    case MessageKind::kAccept:
    case MessageKind::kReject:
      point_to_point_.receive(from, head, reader);
      break;
    case MessageKind::kAbort: {
      const Abort abort = decode<Abort>(reader);
      throw Error(abort.code, abort.text);
    }
    case MessageKind::kBye:
      reader.expect_end();
      peers_.receive_bye(from);
      point_to_point_.depart(from);
      break;
  }
}

// An offer of a send, or its cancellation: they are kept together for a set that does not exist
// yet.
void MessageDispatcher::dispatch_offer(int from, const MessageHead& head, Reader& reader,
                                       std::span<const std::byte> message) {
  if (set_of(head.set, from, message) != nullptr) {
    point_to_point_.receive(from, head, reader);
  } else if (head.set <= registry_.last_number() && head.kind == MessageKind::kOffer) {
    point_to_point_.refuse(
        from, head.set, reader,
        {HP_SHUT_DOWN, "process set " + std::to_string(head.set) + " was removed"});
  }
}

}  // namespace horoplug
