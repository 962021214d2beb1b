// The messages by which processes agree on the next membership (membership.h).
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "base/wire.h"

namespace horoplug {

// A process's random id. The launcher takes part in decisions, but is not a member.
using ProcessId = std::uint64_t;
inline constexpr ProcessId kLauncher = 0;

// The number of an attempt to decide. Ballots of different proposers differ.
struct Ballot {
  std::uint64_t round = 0;  // 0: no ballot
  ProcessId proposer = 0;
  auto operator<=>(const Ballot&) const = default;
};

// A member of a proposed membership. Its index is its rank.
struct MemberRecord {
  ProcessId id = 0;
  std::uint64_t steps = 0;  // training steps that it has done; 0: it has no state yet
  bool operator==(const MemberRecord&) const = default;
};
struct Proposal {
  std::vector<MemberRecord> members;
  bool launcher = true;  // whether the launcher takes part in decisions
  bool operator==(const Proposal&) const = default;
};

// Two processes that cannot reach each other: the smaller id is first.
using BrokenLink = std::pair<ProcessId, ProcessId>;

struct MembershipMessage {
  enum class Kind : std::uint8_t {
    kNews,      // broken links and newcomers that the sender knows of
    kPrepare,   // a ballot begins
    kPromise,   // the sender will ignore lower ballots
    kReject,    // the sender has promised to ignore this ballot; `ballot` is the higher one
    kAccept,    // the ballot's proposal
    kAccepted,  // the sender has accepted it
    kStart,     // the decision: generation + 1 has these members
  };
  static constexpr int kKindCount = 7;

  Kind kind = Kind::kNews;
  std::uint64_t generation = 0;  // the generation that ends
  Ballot ballot{};               // not kNews, kStart
  // kAccept, kStart: the proposal. kPromise: what the sender has accepted in the ballot `accepted`.
  Proposal proposal{};
  Ballot accepted{};                   // kPromise
  std::uint64_t steps = 0;             // kPromise: see MemberRecord
  std::set<BrokenLink> broken{};       // kNews, kPromise
  std::vector<ProcessId> newcomers{};  // kNews, kPromise
  bool operator==(const MembershipMessage&) const = default;
};

Bytes encode(const MembershipMessage& message);
// Throws WireError if the bytes are no message.
MembershipMessage decode_membership_message(std::span<const std::byte> bytes);

}  // namespace horoplug
