// The control messages, as structs and as bytes.
//
// A message is one byte that says its kind, the number of the process set, and the fields below.
// Decoding checks everything that can be checked without knowing the state of the receiver, and
// throws WireError.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/wire.h"
#include "controller/plan.h"
#include "controller/signature.h"

namespace horoplug {

enum class MessageKind : std::uint8_t {
  kHello = 0,          // to everyone, first of all: who I am and how I am configured
  kReady,              // up the tree: these operations are ready in all of my subtree
  kDecisions,          // down the tree: what runs next, in this order
  kLeave,              // up the tree: a rank wants to leave
  kJoin,               // up the tree: a rank has no more data
  kInspectionRequest,  // up the tree: somebody has waited for long, look what is going on
  kInspection,         // down the tree: what are you doing?
  kReport,             // up the tree: this is what my subtree is doing
  kFail,               // to the root of a process set: call off what is pending in it
  kAbort,              // to everyone: the job has failed
  kBye,                // to everyone: I leave in good order
  kDependencyLabels,   // up the tree: the answer to a query
  kBreak,              // up the tree: the plan does not hold any more
  kHalt,               // down the tree: join no further batch of the plan
  kHalted,             // up the tree: how far my subtree has joined
  kWakeUp,             // to whom I wait for: look after connections that wake nobody
  kPing,               // to everyone: something stands still here, do you answer?
  kPong,               // the answer
};
inline constexpr int kMessageKindCount = 18;

struct Hello {
  static constexpr std::uint32_t kProtocol = 7;
  std::uint32_t protocol = kProtocol;
  std::int32_t rank = 0;
  std::int32_t size = 0;
  std::uint64_t segment_bytes = 0;
  std::vector<std::pair<std::string, std::string>> settings;  // must be equal on all ranks
};

// An operation that has no number yet, or has changed, as the subtree of the sender has it. One
// variant without ranks: all of the subtree agree.
struct Request {
  std::string name;
  std::vector<Variant> variants;
};

struct Ready {
  std::uint32_t epoch = 0;
  std::vector<std::uint32_t> ids;  // ascending; they travel as bits
  std::vector<Request> requests;
};

struct DecisionItem {
  enum class Kind : std::uint8_t {
    kBatch = 0,
    kJoined,
    kError,
    kFailAll,
    kClose,
    kDependencyQuery,  // which of the last operations came without a look at the others' results?
    kInstallPlan,    // from here on these operations run again and again, in these batches, unasked
    kUninstallPlan,  // no more
  };
  static constexpr int kKindCount = 8;
  struct Member {
    std::optional<std::uint32_t> id;  // its number
    std::string name;                 // given if the number is new, or there is none
    // Ranks that have joined and take part without having submitted it; they are told what it is.
    std::vector<int> absent;
    Signature signature;  // if some are absent
  };

  Kind kind = Kind::kBatch;
  // kBatch, kJoined: its number. kDependencyQuery, kInstallPlan: the query's. kUninstallPlan: the
  // last batch that runs.
  std::uint64_t batch = 0;
  std::vector<Member> members;   // kBatch
  std::string name;              // kError: the operation that fails
  hp_status code = HP_MISMATCH;  // kError, kFailAll
  std::string text;              // kError, kFailAll
  // kClose: who has left, or nobody (the set was removed). kJoined: who was the last to join.
  std::int32_t rank = 0;
  std::uint32_t operations =
      0;  // kDependencyQuery: so many of the last that were decided make a step
  std::vector<PlanChoice> choices;  // kInstallPlan: which of them share a batch, and how they run
  std::uint32_t rounds = 0;         // kInstallPlan: turns that each of the choices has
};

// "Who has left" when a process set ends because it was removed.
inline constexpr std::int32_t kSetRemoved = -1;

struct Decisions {
  std::uint32_t epoch = 0;
  std::vector<DecisionItem> items;
};

// The answer of a subtree to a query: operations with equal labels came, on every rank of it,
// without a look at a result in between.
struct DependencyLabels {
  std::uint64_t query = 0;
  std::vector<std::uint32_t> labels;  // by place in the query
};

// kBreak, kHalt and kHalted are about the plan of an epoch. `batch`: of kHalted, the last that all
// of the subtree have joined.
struct PlanNotice {
  std::uint32_t epoch = 0;
  std::uint64_t batch = 0;
};

// What one rank is doing.
struct RankReport {
  struct Pending {
    std::uint32_t set = 0;
    std::string name;
    double age = 0;       // seconds since its submission
    bool waited = false;  // a thread is blocked on it
    bool join = false;    // it is the wait for everyone to join
  };
  std::int32_t rank = 0;
  double quiet = 0;        // seconds since anything was submitted or done here
  bool executing = false;  // a batch is running
  std::vector<Pending> pending;
};

struct Report {
  std::uint64_t inspection = 0;
  std::vector<RankReport> ranks;
};

// A failure of a process set (kFail) or of the job (kAbort).
struct Abort {
  hp_status code = HP_ABORTED;
  std::string text;
};

// The head that all messages have.
struct MessageHead {
  MessageKind kind;
  std::uint32_t set;
};
MessageHead read_head(Reader& reader);

Bytes encode(const Hello& hello);
Bytes encode(std::uint32_t set, const Ready& ready);
Bytes encode(std::uint32_t set, const Decisions& decisions);
Bytes encode_leave(std::uint32_t set, int rank);
Bytes encode_join(std::uint32_t set, std::uint32_t epoch, int rank);
Bytes encode_fail(std::uint32_t set, const Abort& failure);
Bytes encode_inspection_request();
Bytes encode_wake_up();
Bytes encode_ping();
Bytes encode_pong();
Bytes encode_inspection(std::uint64_t inspection);
Bytes encode(const Report& report);
Bytes encode(const Abort& abort);
Bytes encode_bye();
Bytes encode(std::uint32_t set, const DependencyLabels& labels);
Bytes encode(MessageKind kind, std::uint32_t set, const PlanNotice& notice);

// The rest of a message after its head.
Hello decode_hello(Reader& reader);
Ready decode_ready(Reader& reader);
Decisions decode_decisions(Reader& reader);
int decode_leave(Reader& reader);
struct Joined {
  std::uint32_t epoch;
  int rank;
};
Joined decode_join(Reader& reader);
std::uint64_t decode_inspection(Reader& reader);
Report decode_report(Reader& reader);
Abort decode_abort(Reader& reader);
DependencyLabels decode_dependency_labels(Reader& reader);
PlanNotice decode_plan_notice(Reader& reader);

}  // namespace horoplug
