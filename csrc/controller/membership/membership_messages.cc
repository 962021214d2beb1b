#include "controller/membership/membership_messages.h"

#include <algorithm>

namespace horoplug {
namespace {

using Kind = MembershipMessage::Kind;

bool has_ballot(Kind kind) { return kind != Kind::kNews && kind != Kind::kStart; }
bool has_proposal(Kind kind) {
  return kind == Kind::kPromise || kind == Kind::kAccept || kind == Kind::kStart;
}
bool has_news(Kind kind) { return kind == Kind::kNews || kind == Kind::kPromise; }

void put(Writer& writer, const Ballot& ballot) {
  writer.put_varint(ballot.round);
  writer.put(ballot.proposer);
}

Ballot get_ballot(Reader& reader) {
  Ballot ballot;
  ballot.round = reader.get_varint();
  ballot.proposer = reader.get<ProcessId>();
  return ballot;
}

void put(Writer& writer, const Proposal& proposal) {
  writer.put_varint(proposal.members.size());
  for (const MemberRecord& member : proposal.members) {
    writer.put(member.id);
    writer.put_varint(member.steps);
  }
  writer.put(static_cast<std::uint8_t>(proposal.launcher));
}

Proposal get_proposal(Reader& reader) {
  Proposal proposal;
  proposal.members.resize(reader.get_count(sizeof(ProcessId) + 1));
  for (MemberRecord& member : proposal.members) {
    member.id = reader.get<ProcessId>();
    member.steps = reader.get_varint();
  }
  proposal.launcher = reader.get_int(1) == 1;
  std::set<ProcessId> ids{kLauncher};
  for (const MemberRecord& member : proposal.members) {
    if (!ids.insert(member.id).second) throw WireError("a member is named twice");
  }
  return proposal;
}

}  // namespace

Bytes encode(const MembershipMessage& message) {
  Writer writer;
  writer.put(message.kind);
  writer.put_varint(message.generation);
  if (has_ballot(message.kind)) put(writer, message.ballot);
  if (has_proposal(message.kind)) put(writer, message.proposal);
  if (message.kind == Kind::kPromise) {
    put(writer, message.accepted);
    writer.put_varint(message.steps);
  }
  if (has_news(message.kind)) {
    writer.put_varint(message.broken.size());
    for (const auto& [one, other] : message.broken) {
      writer.put(one);
      writer.put(other);
    }
    writer.put_varint(message.newcomers.size());
    for (const ProcessId id : message.newcomers) writer.put(id);
  }
  return writer.take();
}

MembershipMessage decode_membership_message(std::span<const std::byte> bytes) {
  Reader reader(bytes);
  MembershipMessage message;
  message.kind = reader.get_enum<Kind>(MembershipMessage::kKindCount);
  message.generation = reader.get_varint();
  if (has_ballot(message.kind)) message.ballot = get_ballot(reader);
  if (has_proposal(message.kind)) message.proposal = get_proposal(reader);
  if (message.kind == Kind::kPromise) {
    message.accepted = get_ballot(reader);
    message.steps = reader.get_varint();
  }
  if (has_news(message.kind)) {
    for (std::size_t rest = reader.get_count(2 * sizeof(ProcessId)); rest > 0; --rest) {
      const auto one = reader.get<ProcessId>();
      const auto other = reader.get<ProcessId>();
      if (one >= other) throw WireError("a broken link has its ends in the wrong order");
      message.broken.emplace(one, other);
    }
    message.newcomers.resize(reader.get_count(sizeof(ProcessId)));
    for (ProcessId& id : message.newcomers) id = reader.get<ProcessId>();
  }
  reader.expect_end();
  return message;
}

}  // namespace horoplug
