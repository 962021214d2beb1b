#include "controller/membership/membership.h"

#include <algorithm>
#include <utility>

namespace horoplug {
namespace {

constexpr std::size_t kDecisionsKept = 16;

BrokenLink link_between(ProcessId one, ProcessId other) { return std::minmax(one, other); }

bool contains(const std::vector<ProcessId>& ids, ProcessId id) {
  return std::find(ids.begin(), ids.end(), id) != ids.end();
}

}  // namespace

Membership::Membership(const Options& options, std::vector<ProcessId> members)
    : options_(options), members_(std::move(members)) {}

// ---- who there is ---------------------------------------------------------------------------

std::vector<ProcessId> Membership::participants() const {
  std::vector<ProcessId> all = members_;
  if (launcher_) all.push_back(kLauncher);
  return all;
}

bool Membership::takes_part(ProcessId id) const {
  return id == kLauncher ? launcher_ && !members_.empty() : contains(members_, id);
}

bool Membership::reaches(ProcessId peer) const {
  return peer == options_.self || !broken_.contains(link_between(options_.self, peer));
}

// The member of the lowest rank that reaches no lower one.
bool Membership::is_proposer() const {
  for (const ProcessId member : members_) {
    if (member == options_.self) return true;
    if (reaches(member)) return false;
  }
  return false;
}

std::size_t Membership::votes_of(ProcessId id) const {
  return id == kLauncher ? members_.size() - 1 : 1;
}

bool Membership::is_majority(std::size_t votes) const {
  const std::size_t all = members_.size() + (launcher_ ? votes_of(kLauncher) : 0);
  return 2 * votes > all;
}

// Those that this process reaches could decide.
bool Membership::has_quorum() const {
  std::size_t votes = 0;
  for (const ProcessId id : participants()) votes += reaches(id) ? votes_of(id) : 0;
  return is_majority(votes);
}

// ---- messages -------------------------------------------------------------------------------

MembershipMessage Membership::make(Kind kind) const {
  MembershipMessage message;
  message.kind = kind;
  message.generation = generation_;
  return message;
}

// With all that this process knows.
MembershipMessage Membership::make_news(Kind kind) const {
  MembershipMessage message = make(kind);
  message.broken = broken_;
  message.newcomers = newcomers_;
  return message;
}

// To itself at once.
void Membership::send(ProcessId to, MembershipMessage message) {
  if (to == options_.self) {
    receive(to, message);
  } else {
    outgoing_.push_back({to, std::move(message)});
  }
}

// To all that take part and can be reached.
void Membership::broadcast(const MembershipMessage& message) {
  for (const ProcessId id : participants()) {
    if (id != options_.self && reaches(id)) outgoing_.push_back({id, message});
  }
}

// Either that member is the proposer, or it tells a lower one. If all told all, a failure in a job
// of n ranks would cost n * n messages.
void Membership::tell_lowest() {
  const auto lowest = std::find_if(members_.begin(), members_.end(),
                                   [&](ProcessId member) { return reaches(member); });
  if (lowest == members_.end()) return;
  send(*lowest, make_news(Kind::kNews));
}

// The sender of a message of an earlier generation has missed its end.
void Membership::answer_late(ProcessId from, const MembershipMessage& message) {
  const std::uint64_t age = generation_ - message.generation;
  if (message.kind == Kind::kStart || age > decisions_.size()) return;
  MembershipMessage start = make(Kind::kStart);
  start.generation = message.generation;
  start.proposal = decisions_[decisions_.size() - static_cast<std::size_t>(age)];
  send(from, std::move(start));
}

void Membership::receive(ProcessId from, const MembershipMessage& message) {
  if (excluded_) return;
  if (members_.empty()) {  // a newcomer
    if (message.kind == Kind::kStart) {
      generation_ = message.generation;
      return decide(message.proposal);
    }
    if (message.generation == 0) return;
    generation_ = message.generation - 1;
  }
  if (message.generation < generation_) return answer_late(from, message);
  if (message.generation > generation_) {
    // Whoever sends this knows how this generation has ended, and answers with it.
    early_.emplace_back(from, message);
    send(from, make(Kind::kNews));
    return;
  }
  switch (message.kind) {
    case Kind::kNews:
      return learn(message.broken, message.newcomers);
    case Kind::kPrepare:
      return receive_prepare(from, message);
    case Kind::kAccept:
      return receive_accept(from, message);
    case Kind::kStart:
      return decide(message.proposal);
    case Kind::kPromise:
    case Kind::kReject:
    case Kind::kAccepted:
      return receive_answer(from, message);
  }
}

// ---- what has happened ----------------------------------------------------------------------

void Membership::set_steps(std::uint64_t steps) {
  if (!ended_) steps_ = steps;
}

void Membership::lose(ProcessId peer) {
  if (takes_part(peer) && peer != options_.self) {
    learn({link_between(options_.self, peer)}, {});
  }
}

void Membership::add_newcomer(ProcessId id) { learn({}, {id}); }

void Membership::remove_newcomer(ProcessId id) { std::erase(newcomers_, id); }

void Membership::admit() {
  if (is_proposer() && !attempt_ && !newcomers_.empty()) begin_attempt();
}

void Membership::tick(std::uint64_t random) {
  if (attempt_ && attempt_->rejected && random % 2 == 0) begin_attempt();
}

// Begins a ballot if it is this process's turn. Otherwise passes on what it did not know yet.
void Membership::learn(const std::set<BrokenLink>& broken,
                       const std::vector<ProcessId>& newcomers) {
  bool is_new = false;
  for (const BrokenLink& link : broken) {
    const auto [one, other] = link;
    if (!takes_part(one) || !takes_part(other) || !broken_.insert(link).second) continue;
    is_new = true;
  }
  for (const ProcessId id : newcomers) {
    if (takes_part(id) || contains(newcomers_, id)) continue;
    newcomers_.push_back(id);
    is_new = true;
  }
  if (!is_new) return;
  if (!broken_.empty()) end_generation();
  if (!has_quorum()) report_once(Event::Kind::kNoQuorum);
  if (!is_proposer()) return tell_lowest();
  if (attempt_) return propose();
  if (!broken_.empty()) begin_attempt();
}

void Membership::end_generation() {
  if (!ended_) events_.push_back({Event::Kind::kEnded});
  ended_ = true;
}

void Membership::report_once(Event::Kind kind) {
  if (reported_.insert(kind).second) events_.push_back({kind});
}

// ---- as a proposer --------------------------------------------------------------------------

void Membership::begin_attempt() {
  attempt_.emplace(Ballot{last_round_ + 1, options_.self});
  MembershipMessage prepare = make(Kind::kPrepare);
  prepare.ballot = attempt_->ballot;
  broadcast(prepare);
  receive_prepare(options_.self, prepare);
}

void Membership::receive_answer(ProcessId from, const MembershipMessage& message) {
  if (!attempt_) return;
  if (message.kind == Kind::kReject) {
    last_round_ = std::max(last_round_, message.ballot.round);
    if (message.ballot > attempt_->ballot) attempt_->rejected = true;
    return;
  }
  if (message.ballot != attempt_->ballot) return;
  if (message.kind == Kind::kAccepted) {
    attempt_->accepted.insert(from);
    return decide_if_accepted();
  }
  attempt_->promises[from] = {message.accepted, message.proposal, message.steps};
  learn(message.broken, message.newcomers);
  if (attempt_) propose();
}

// Proposes members as soon as all processes that can be reached have answered.
void Membership::propose() {
  if (attempt_->proposal || attempt_->rejected) return;
  std::size_t votes = 0;
  for (const ProcessId id : participants()) {
    const bool answered = attempt_->promises.contains(id);
    if (!answered && reaches(id)) return;
    if (answered) votes += votes_of(id);
  }
  if (!is_majority(votes)) return;  // learn() has reported it
  // What an earlier ballot may have decided stands.
  Ballot highest;
  for (const auto& [id, promise] : attempt_->promises) {
    if (promise.accepted > highest) {
      highest = promise.accepted;
      attempt_->proposal = promise.proposal;
    }
  }
  if (!attempt_->proposal) {
    Proposal proposal = next_members();
    if (proposal.members.size() < options_.least) return report_once(Event::Kind::kTooFew);
    attempt_->proposal = std::move(proposal);
  }
  MembershipMessage accept = make(Kind::kAccept);
  accept.ballot = attempt_->ballot;
  accept.proposal = *attempt_->proposal;
  broadcast(accept);
  receive_accept(options_.self, accept);
}

// Of two that do not reach each other, the launcher stays, or the member with the lower rank.
Proposal Membership::next_members() const {
  Proposal proposal;
  proposal.launcher = attempt_->promises.contains(kLauncher) && reaches(kLauncher);
  std::vector<ProcessId> chosen;
  if (proposal.launcher) chosen.push_back(kLauncher);
  for (const ProcessId id : members_) {
    const auto promise = attempt_->promises.find(id);
    if (promise == attempt_->promises.end() || !reaches(id)) continue;
    const bool reaches_all = std::none_of(chosen.begin(), chosen.end(), [&](ProcessId other) {
      return broken_.contains(link_between(id, other));
    });
    if (!reaches_all) continue;
    chosen.push_back(id);
    proposal.members.push_back({id, promise->second.steps});
  }
  for (const ProcessId id : newcomers_) {
    if (proposal.members.size() < options_.most) proposal.members.push_back({id, 0});
  }
  return proposal;
}

void Membership::decide_if_accepted() {
  std::size_t votes = 0;
  for (const ProcessId id : attempt_->accepted) votes += votes_of(id);
  if (!is_majority(votes)) return;
  MembershipMessage start = make(Kind::kStart);
  start.proposal = *attempt_->proposal;
  broadcast(start);
  decide(start.proposal);
}

// ---- as an acceptor -------------------------------------------------------------------------

void Membership::reject(ProcessId from) {
  MembershipMessage message = make(Kind::kReject);
  message.ballot = promised_;
  send(from, std::move(message));
}

void Membership::receive_prepare(ProcessId from, const MembershipMessage& message) {
  if (!takes_part(from)) return;
  last_round_ = std::max(last_round_, message.ballot.round);
  if (message.ballot <= promised_) return reject(from);
  promised_ = message.ballot;
  end_generation();
  MembershipMessage promise = make_news(Kind::kPromise);
  promise.ballot = promised_;
  promise.accepted = accepted_;
  promise.proposal = proposal_;
  promise.steps = steps_;
  send(from, std::move(promise));
}

void Membership::receive_accept(ProcessId from, const MembershipMessage& message) {
  if (!takes_part(from)) return;
  last_round_ = std::max(last_round_, message.ballot.round);
  if (message.ballot < promised_) return reject(from);
  promised_ = accepted_ = message.ballot;
  proposal_ = message.proposal;
  MembershipMessage accepted = make(Kind::kAccepted);
  accepted.ballot = accepted_;
  send(from, std::move(accepted));
}

// ---- the next generation --------------------------------------------------------------------

void Membership::decide(const Proposal& proposal) {
  std::vector<ProcessId> next;
  for (const MemberRecord& member : proposal.members) next.push_back(member.id);
  if (!members_.empty()) end_generation();
  // Newcomers know only the launcher. The proposer may not reach those that are excluded.
  MembershipMessage start = make(Kind::kStart);
  start.proposal = proposal;
  for (const ProcessId id : next) {
    if (options_.self == kLauncher && !contains(members_, id)) send(id, start);
  }
  for (const ProcessId id : members_) {
    if (id != options_.self && !contains(next, id) && reaches(id)) send(id, start);
  }
  const bool stays = options_.self == kLauncher ? proposal.launcher : contains(next, options_.self);
  if (!stays) {
    excluded_ = true;
    events_.push_back({Event::Kind::kExcluded});
    return;
  }
  ++generation_;
  members_ = std::move(next);
  launcher_ = proposal.launcher;
  decisions_.push_back(proposal);
  if (decisions_.size() > kDecisionsKept) decisions_.pop_front();
  std::erase_if(newcomers_, [&](ProcessId id) { return contains(members_, id); });
  ended_ = false;
  broken_.clear();
  reported_.clear();
  promised_ = accepted_ = {};
  proposal_ = {};
  attempt_.reset();
  last_round_ = 0;
  Event started{Event::Kind::kStarted};
  started.members = proposal.members;
  events_.push_back(std::move(started));
  for (auto& [from, message] : std::exchange(early_, {})) receive(from, message);
}

}  // namespace horoplug
