// Decisions are in decision_messages.cc.
#include "controller/messages/messages.h"

#include <limits>

#include "controller/messages/message_fields.h"
#include "controller/messages/point_to_point_messages.h"

namespace horoplug {

MessageHead read_head(Reader& reader) {
  MessageHead head{};
  head.kind = reader.get_enum<MessageKind>(kMessageKindCount);
  Decoder rest(reader);
  rest(head.set);
  return head;
}

Bytes encode(MessageKind kind) { return Encoder(kind, 0).take(); }

// ---- the handshake ----

void fields(auto& archive, Is<std::pair<std::string, std::string>> auto& setting) {
  archive(setting.first, setting.second);
}

void fields(auto& archive, Is<Hello> auto& hello) {
  archive(hello.protocol);
  if (hello.protocol != Hello::kProtocol) return archive.ignore_rest();
  archive(hello.rank, hello.size, hello.segment_bytes);
  archive.list(hello.settings, 2);
}

// ---- negotiation ----

void fields(auto& archive, Is<Variant> auto& variant) {
  archive.again(variant.signature);
  archive.again(variant.ranks);
}

void fields(auto& archive, Is<Request> auto& request) {
  archive.name(request.name);
  archive.list(request.variants, 2);
  archive.check(!request.variants.empty(), "readiness request without variants");
  if (request.variants.size() == 1) return;
  for (const Variant& variant : request.variants) {
    archive.check(!variant.ranks.empty(), "variants without ranks");
  }
}

void fields(auto& archive, Is<Ready> auto& ready) {
  archive(ready.agreement);
  archive.bits(ready.ids);
  archive.list(ready.requests, 6);
}

void fields(auto& archive, Is<Leave> auto& leave) {
  archive.number(leave.rank, kMaxRank, kSetRemoved);
}

void fields(auto& archive, Is<Joined> auto& joined) {
  archive(joined.agreement);
  archive.number(joined.rank, kMaxRank);
}

void fields(auto& archive, Is<DependencyLabels> auto& answer) {
  archive(answer.query, answer.labels);
}

void fields(auto& archive, Is<PlanNotice> auto& notice) { archive(notice.epoch, notice.batch); }

// ---- failures and stall inspections ----

void fields(auto& archive, Is<Abort> auto& failure) { archive(failure.code, failure.text); }

void fields(auto& archive, Is<InspectionRequest> auto& request) {
  archive(request.age, request.for_groups);
}

void fields(auto& archive, Is<OperationKey> auto& key) { archive(key.set, key.name, key.group); }

void fields(auto& archive, Is<InspectionQuestion> auto& question) {
  archive(question.number, question.quiet, question.is_second);
  archive.list(question.operations, 3, Report::kMostOperations);
}

void fields(auto& archive, Is<Report::Pending> auto& pending) {
  archive(pending.key, pending.age, pending.join);
  archive.number(pending.peer, kMaxRank, -1);
  archive(pending.submitted, pending.waiting);
  if (!pending.key.group.empty()) archive(pending.members);
}

void fields(auto& archive, Is<Report> auto& report) {
  archive(report.question, report.ranks);
  archive.list(report.pending, 15, Report::kMostOperations);
  archive(report.quiet, report.waiting_for_unnamed, report.joined, report.busy_threads);
}

void fields(auto& archive, Is<CallOff> auto& call_off) {
  archive(call_off.operation, call_off.failure);
}

// ---- send and recv ----

void fields(auto& archive, Is<Offer> auto& offer) {
  archive(offer.send);
  archive.number(offer.tag, std::numeric_limits<std::int32_t>::max());
  archive.number(offer.dtype, kDTypeCount - 1);
  archive(offer.shape);
  archive.number(offer.source, Offer::kSourceCount - 1);
  if (offer.source == Offer::Source::kInline) archive(offer.data);
}

void fields(auto& archive, Is<Accept> auto& accept) { archive(accept.send, accept.slots); }

void fields(auto& archive, Is<Refusal> auto& refusal) {
  archive(refusal.send, refusal.code, refusal.text);
}

#define HOROPLUG_MESSAGE(Message)                                             \
  template Bytes encode(MessageKind kind, std::uint32_t set, const Message&); \
  template Message decode(Reader& reader);
HOROPLUG_MESSAGE(Hello)
HOROPLUG_MESSAGE(Ready)
HOROPLUG_MESSAGE(Leave)
HOROPLUG_MESSAGE(Joined)
HOROPLUG_MESSAGE(DependencyLabels)
HOROPLUG_MESSAGE(PlanNotice)
HOROPLUG_MESSAGE(Abort)
HOROPLUG_MESSAGE(InspectionRequest)
HOROPLUG_MESSAGE(InspectionQuestion)
HOROPLUG_MESSAGE(Report)
HOROPLUG_MESSAGE(CallOff)
HOROPLUG_MESSAGE(Offer)
HOROPLUG_MESSAGE(Accept)
HOROPLUG_MESSAGE(Refusal)
#undef HOROPLUG_MESSAGE

}  // namespace horoplug
