// The control messages as structs, and their encoding.
//
// A message is one byte for its kind, the number of the process set, and the fields below. Decoding
// validates everything that does not depend on the receiver's state, and throws WireError.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/time.h"
#include "base/wire.h"
#include "controller/state/plan_choice.h"
#include "controller/state/rank_ranges.h"
#include "controller/state/signature.h"

namespace horoplug {

enum class MessageKind : std::uint8_t {
  kHello = 0,          // to every connected rank, first: identity and configuration of the sender
  kReady,              // up the tree: operations that are ready in the sender's whole subtree
  kDecisions,          // down the tree: the batches to run, in this order
  kLeave,              // up the tree: a rank wants to leave
  kJoin,               // up the tree: a rank has no more data
  kInspectionRequest,  // up the tree: an operation has waited for long; start a stall inspection
  kInspection,         // down the tree: report your state
  kReport,             // up the tree: the state of the sender's subtree
  kFail,               // to the root of a process set: fail its pending operations
  kAbort,              // to every connected rank: the job has failed
  kBye,                // to every connected rank: the sender leaves in good order
  kDependencyLabels,   // up the tree: the answer to a dependency query
  kBreak,              // up the tree: the plan must end
  kHalt,               // down the tree: join no further batch of the plan
  kHalted,             // up the tree: the last batch that the subtree has joined
  kWakeUp,      // to a rank that the sender waits for: poll the links that have no notification
  kPing,        // to a rank that may be to blame for a delay: answer with kPong
  kPong,        // the answer to kPing
  kOffer,       // to the receiver of a send: see point_to_point_matcher.h
  kAccept,      // to its sender: the transfer may begin
  kReject,      // to its sender: the recv does not fit
  kCancel,      // to its receiver: the send has failed
  kCallOff,     // to a rank that waits for an operation of another group: fail it there
  kIntroduced,  // up the tree: all ranks of the subtree and their connected peers have exchanged
                // kHello; down the tree: all ranks of the job have
};
inline constexpr int kMessageKindCount = 24;

struct Hello {
  static constexpr MessageKind kKind = MessageKind::kHello;
  static constexpr std::int32_t kProtocol = 23;
  std::int32_t protocol = kProtocol;
  std::int32_t rank = 0;
  std::int32_t size = 0;
  std::uint64_t segment_bytes = 0;
  std::vector<std::pair<std::string, std::string>> settings;  // must be equal on all ranks
};

// An operation of the sender's subtree that has no id yet, or whose signature has changed. A single
// variant without ranks means that the whole subtree agrees.
struct Request {
  std::string name;
  std::vector<Variant> variants;
};

struct Ready {
  static constexpr MessageKind kKind = MessageKind::kReady;
  std::uint32_t agreement = 0;
  std::vector<std::uint32_t> ids;  // ascending; encoded as a bit field
  std::vector<Request> requests;
};

struct DecisionItem {
  enum class Kind : std::uint8_t {
    kBatch = 0,
    kJoined,
    kError,
    kFailAll,
    kClose,
    kDependencyQuery,  // asks which of the last operations share a dependency stage
    kInstallPlan,      // from here on the operations of a remembered step run in these batches,
                       // without negotiation
    kUninstallPlan,    // ends the plan
    kPausePlan,        // batches that are not of the plan follow; then it goes on (kResumePlan) or
                       // another plan takes its place
    kResumePlan,
    kRememberPlan,  // the step of the last dependency query can be installed from now on
  };
  static constexpr int kKindCount = 11;
  struct Member {
    std::optional<std::uint32_t> id;  // its id in the name table
    std::string name;                 // present if the id is new, or there is none
    // Ranks that have joined and take part without having submitted the operation; they need its
    // signature.
    RankRanges absent;
    Signature signature;  // present if ranks are absent
  };

  Kind kind = Kind::kBatch;
  // kBatch, kJoined: the batch's number. kDependencyQuery, kRememberPlan: the query's number.
  // kUninstallPlan, kPausePlan: the last batch of the plan that runs.
  std::uint64_t batch = 0;
  std::vector<Member> members;   // kBatch
  std::string name;              // kError: the operation that fails
  hp_status code = HP_MISMATCH;  // kError, kFailAll
  std::string text;              // kError, kFailAll
  // kClose: the rank that has left, or kSetRemoved. kJoined: the last rank to join.
  std::int32_t rank = 0;
  std::uint32_t operations =
      0;  // kDependencyQuery: number of the last decided operations that form a step
  std::uint32_t place = 0;  // kRememberPlan, kInstallPlan: where the ranks remember the plan
  // kInstallPlan: the batches of a step, and their settings; none: as when it was last installed.
  std::vector<PlanChoice> choices;
  std::uint32_t rounds = 0;   // kInstallPlan: number of turns of each choice, if there are choices
  std::uint32_t skipped = 0;  // kInstallPlan: batches of the first step that have already run
};

// In place of a rank when a process set ends because it was removed.
inline constexpr std::int32_t kSetRemoved = -1;

struct Decisions {
  static constexpr MessageKind kKind = MessageKind::kDecisions;
  std::uint32_t agreement = 0;
  std::vector<DecisionItem> items;
};

// A rank wants to leave, or a process set is removed (kSetRemoved).
struct Leave {
  static constexpr MessageKind kKind = MessageKind::kLeave;
  std::int32_t rank = 0;
};

// A rank has no more data.
struct Joined {
  static constexpr MessageKind kKind = MessageKind::kJoin;
  std::uint32_t agreement = 0;
  std::int32_t rank = 0;
};

// The answer of a subtree to a dependency query: operations with equal labels share a dependency
// stage on every rank of the subtree.
struct DependencyLabels {
  static constexpr MessageKind kKind = MessageKind::kDependencyLabels;
  std::uint64_t query = 0;
  std::vector<std::uint32_t> labels;  // by position in the query
};

// The content of kBreak, kHalt and kHalted, for the plan of an epoch. `batch` (kHalted): the last
// batch that the whole subtree has joined.
struct PlanNotice {
  std::uint32_t epoch = 0;
  std::uint64_t batch = 0;
};

// The state of one rank.
struct RankReport {
  struct Pending {
    std::uint32_t set = 0;
    std::string name;
    Seconds age{};        // since submission
    bool waited = false;  // a thread is blocked on it
    bool join = false;    // the operation is a join
    int peer = -1;        // send, recv: the only rank that it waits for
    // Of an operation of another group of this process: the group, and the ranks of its process
    // set. All ranks are those of this engine.
    std::string group{};
    std::vector<int> members{};
  };
  std::int32_t rank = 0;
  Seconds quiet{};                 // since the last submission or completion on this rank
  bool executing = false;          // a batch is running
  std::uint32_t busy_threads = 0;  // threads that may submit operations, since they do not wait
  std::vector<Pending> pending;
};

// An operation of a process set; sends and recvs name their peer and tag, too.
struct OperationKey {
  std::uint32_t set = 0;
  std::string name;
  std::string group{};  // empty: that of this engine; see StallInspector::attach()
  auto operator<=>(const OperationKey&) const = default;
};

// A question to all ranks. The first one of an inspection asks each rank to name a few of its
// pending operations, the second one what each rank does about the operations that were named.
struct InspectionQuestion {
  static constexpr MessageKind kKind = MessageKind::kInspection;
  std::uint64_t number = 0;
  Seconds quiet{};  // a rank without events for this long is quiet
  bool is_second = false;
  std::vector<OperationKey> operations;  // the second question's
};

// The answer of a subtree. Its size depends on how many operations are named, which is limited, and
// on how many ranges of ranks differ in what they do.
struct Report {
  static constexpr MessageKind kKind = MessageKind::kReport;
  struct Pending {
    OperationKey key;
    Seconds age{};  // the longest time since submission on a rank
    bool join = false;
    int peer = -1;         // send, recv: the only rank that it waits for
    RankRanges submitted;  // the ranks on which it is pending
    RankRanges waiting;    // those of them with a thread that is blocked on it
    RankRanges members{};  // of an operation of another group: the ranks of its process set
  };
  // The limits of what may be named.
  static constexpr std::size_t kMostOperations = 1024;
  static constexpr std::size_t kMostNameBytes = 1 << 16;

  std::uint64_t question = 0;
  std::uint32_t ranks = 0;         // the number of ranks that have answered
  std::vector<Pending> pending;    // by key, ascending
  RankRanges quiet;                // ranks on which no batch runs, and which are quiet
  RankRanges waiting_for_unnamed;  // ranks with a thread blocked on an operation not in `pending`
  std::map<std::uint32_t, RankRanges> joined;        // by set: ranks that have joined
  std::map<std::uint32_t, RankRanges> busy_threads;  // by number: ranks with so many, if any
};

// A failure of a process set (kFail) or of the job (kAbort).
struct Abort {
  static constexpr MessageKind kKind = MessageKind::kAbort;
  hp_status code = HP_ABORTED;
  std::string text;
};

// A rank below asks for an inspection.
struct InspectionRequest {
  static constexpr MessageKind kKind = MessageKind::kInspectionRequest;
  Seconds age{};            // for how long an operation has been pending
  bool for_groups = false;  // that is an operation of another group, and none of this one is late
};

// A deadlock has been found: all operations of the process set fail that wait for other ranks, if
// this one is still pending.
struct CallOff {
  static constexpr MessageKind kKind = MessageKind::kCallOff;
  OperationKey operation;  // of another group
  Abort failure;
};

// The header of every message.
struct MessageHead {
  MessageKind kind;
  std::uint32_t set;
};
MessageHead read_head(Reader& reader);

// A message that consists of its header, for the whole job.
Bytes encode(MessageKind kind);
template <typename Message>
Bytes encode(MessageKind kind, std::uint32_t set, const Message& message);
// Of the struct's own kind.
template <typename Message>
Bytes encode(std::uint32_t set, const Message& message) {
  return encode(Message::kKind, set, message);
}
template <typename Message>
Bytes encode(const Message& message) {
  return encode(Message::kKind, 0, message);
}

// Decodes the rest of a message after its header.
template <typename Message>
Message decode(Reader& reader);

}  // namespace horoplug
