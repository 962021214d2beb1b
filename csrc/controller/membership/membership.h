// Agreement on who belongs to a job whose processes come and go: the state machine of one process,
// without I/O and clocks.
//
// A membership is the ordered list of the members of one generation; a member's index is its rank.
// The members of a generation, and the launcher, decide the members of the next one by Paxos
// (Lamport, "The Part-Time Parliament", 1998) with one decision for each generation:
//
//   any process   kNews      a link is broken; sent to the lowest rank that can be reached
//   proposer      kPrepare   the member of the lowest rank that reaches no lower one begins
//   the others    kPromise   which proposal they have accepted, how many steps they have done
//   proposer      kAccept    those that have answered and reach one another, then the newcomers
//   the others    kAccepted
//   proposer      kStart     more than half of the votes have accepted
//
// Each member has one vote; the launcher has one less than there are members, so that with it a
// single member can go on. If the launcher is lost, all members together decide a generation in
// which it has no votes; from then on, more than half of the members are needed.
//
// Invariants: all processes that start a generation start it with the same members. Members keep
// their order, and newcomers follow them. Once a process has promised, it does not complete any
// operation of the generation; the steps in a proposal are therefore final.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "controller/membership/membership_messages.h"

namespace horoplug {

class Membership {
 public:
  struct Options {
    ProcessId self = kLauncher;
    std::size_t least = 1;        // a membership is not proposed with fewer members
    std::size_t most = SIZE_MAX;  // newcomers beyond it go on waiting
  };

  // A member of the first generation, or the launcher.
  Membership(const Options& options, std::vector<ProcessId> members);
  // A newcomer, which belongs to no generation yet.
  explicit Membership(const Options& options) : Membership(options, {}) {}

  std::uint64_t generation() const { return generation_; }
  const std::vector<ProcessId>& members() const { return members_; }

  // This member has done so many training steps. Has no effect between kEnded and kStarted.
  void set_steps(std::uint64_t steps);

  // The connection to a process is lost, or could not be made when there was a message for it.
  // There is no way back within the generation.
  void lose(ProcessId peer);
  // The launcher: a process waits to become a member, or does so no longer.
  void add_newcomer(ProcessId id);
  void remove_newcomer(ProcessId id);
  // The program can go on with other members at this point. The lowest rank begins a ballot if a
  // newcomer waits.
  void admit();
  // To be called from time to time: begins a ballot that has lost against another one again.
  // `random`: any random number; it keeps two proposers from disturbing each other for ever.
  void tick(std::uint64_t random);

  // Messages of one process must arrive in the order in which they were sent.
  void receive(ProcessId from, const MembershipMessage& message);

  struct Message {
    ProcessId to;
    MembershipMessage message;
  };
  std::vector<Message> take_outgoing() { return std::exchange(outgoing_, {}); }

  struct Event {
    enum class Kind {
      kEnded,     // all operations of the generation that have not completed fail
      kStarted,   // the generation begins; `members` has the state of each member
      kExcluded,  // the next generation does not have this process
      kNoQuorum,  // those that this process reaches cannot decide: it ends
      kTooFew,    // fewer members than allowed can be reached: newcomers are waited for
    };
    Kind kind;
    std::vector<MemberRecord> members{};  // kStarted
  };
  std::vector<Event> take_events() { return std::exchange(events_, {}); }

 private:
  using Kind = MembershipMessage::Kind;
  struct Promise {
    Ballot accepted;
    Proposal proposal;
    std::uint64_t steps = 0;
  };
  // An attempt of this process to decide.
  struct Attempt {
    explicit Attempt(const Ballot& number) : ballot(number) {}
    Ballot ballot;
    std::map<ProcessId, Promise> promises;
    std::optional<Proposal> proposal;
    std::set<ProcessId> accepted;
    bool rejected = false;
  };

  std::vector<ProcessId> participants() const;
  bool takes_part(ProcessId id) const;
  bool reaches(ProcessId peer) const;
  bool is_proposer() const;
  std::size_t votes_of(ProcessId id) const;
  bool is_majority(std::size_t votes) const;
  bool has_quorum() const;

  MembershipMessage make(Kind kind) const;
  MembershipMessage make_news(Kind kind) const;
  void send(ProcessId to, MembershipMessage message);
  void broadcast(const MembershipMessage& message);
  void tell_lowest();
  void answer_late(ProcessId from, const MembershipMessage& message);

  void learn(const std::set<BrokenLink>& broken, const std::vector<ProcessId>& newcomers);
  void end_generation();
  void begin_attempt();
  void propose();
  Proposal next_members() const;
  void decide_if_accepted();
  void decide(const Proposal& proposal);
  void report_once(Event::Kind kind);

  void reject(ProcessId from);
  void receive_prepare(ProcessId from, const MembershipMessage& message);
  void receive_accept(ProcessId from, const MembershipMessage& message);
  void receive_answer(ProcessId from, const MembershipMessage& message);

  const Options options_;
  std::uint64_t generation_ = 0;
  std::vector<ProcessId> members_;  // of the current generation; empty: a newcomer
  bool launcher_ = true;            // the launcher has votes
  std::uint64_t steps_ = 0;
  bool ended_ = false;
  bool excluded_ = false;
  std::set<BrokenLink> broken_;  // between those that take part in the generation
  std::set<Event::Kind> reported_;

  // As an acceptor.
  Ballot promised_;
  Ballot accepted_;
  Proposal proposal_;  // accepted in that ballot

  std::optional<Attempt> attempt_;
  std::uint64_t last_round_ = 0;      // the highest one seen
  std::vector<ProcessId> newcomers_;  // those that wait
  // What earlier generations have decided, for processes that have missed it; the last is
  // generation_ - 1.
  std::deque<Proposal> decisions_;
  // Messages of later generations.
  std::vector<std::pair<ProcessId, MembershipMessage>> early_;
  std::vector<Message> outgoing_;
  std::vector<Event> events_;
};

}  // namespace horoplug
