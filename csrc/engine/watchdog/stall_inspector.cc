#include "engine/watchdog/stall_inspector.h"

#include "engine/job_tree.h"

namespace horoplug {
namespace {

std::string gave_up(const Limit& limit) { return "; giving up (" + limit.set_by() + ")"; }

// The clock may have been read before.
template <typename Time>
Seconds age(Time since, Time now) {
  return std::max(Seconds::zero(), now - since);
}

// A send or recv with the other end. Every rank in the set may help a recv from any rank. Its name
// has to be unique: an operation of one name that all ranks have submitted waits for nobody.
std::string name_of_transfer(const Operation& operation, int rank) {
  const int peer = operation.signature().root;
  const bool sends = operation.signature().op == OpKind::kSend;
  const std::string partner = peer == PointToPointMatcher::kAnyRank
                                  ? " of rank " + std::to_string(rank) + " from any rank"
                                  : (sends ? " to rank " : " from rank ") + std::to_string(peer);
  return operation.name() + partner + ", tag " + std::to_string(operation.tag);
}

}  // namespace

StallInspector::StallInspector(const EngineConfig& config, Mesh& mesh,
                               const ProcessSetRegistry& registry,
                               const PointToPoint& point_to_point, const HandleTable& handles,
                               Suspicion& suspicion, const Peers& peers, const Activity& activity,
                               RunningClock& clock)
    : config_(config),
      mesh_(mesh),
      registry_(registry),
      point_to_point_(point_to_point),
      handles_(handles),
      suspicion_(suspicion),
      peers_(peers),
      activity_(activity),
      clock_(clock),
      position_(position_in_job(config)),
      inspection_(position_) {}

StallInspector::~StallInspector() {
  for (const auto& group : groups()) group->end();
  if (const auto own = own_group()) own->end();
}

void StallInspector::attach(std::shared_ptr<AttachedGroup> group) {
  std::lock_guard lock(groups_mutex_);
  groups_.push_back(std::move(group));
  has_groups_.store(true);
}

void StallInspector::join_search(std::shared_ptr<AttachedGroup> own) {
  std::lock_guard lock(groups_mutex_);
  own_group_ = std::move(own);
  has_groups_.store(true);
}

std::vector<std::shared_ptr<AttachedGroup>> StallInspector::groups() {
  if (!has_groups_.load(std::memory_order_relaxed)) return {};
  std::lock_guard lock(groups_mutex_);
  std::erase_if(groups_, [](const auto& group) { return group->has_ended(); });
  return groups_;
}

std::shared_ptr<AttachedGroup> StallInspector::own_group() {
  if (!has_groups_.load(std::memory_order_relaxed)) return nullptr;
  std::lock_guard lock(groups_mutex_);
  return own_group_;
}

Seconds StallInspector::interval() const {
  const Seconds first =
      std::min({config_.options.deadlock_time.get(), config_.options.stall_check_time.get(),
                progress_limit(config_.options).time});
  return std::clamp(first / 2, Seconds(0.05), Seconds(30));
}

// How long a rank in a deadlock has been quiet at least.
Seconds StallInspector::quiet_time() const {
  const Seconds deadlock = config_.options.deadlock_time.get();
  return deadlock < kForever ? deadlock : Seconds::zero();
}

// A join waits for as long as the other ranks have data, which is no stall: it counts from the last
// sign that they have.
RunningTime StallInspector::waiting_since(const ProcessSet& set, const Operation& operation) {
  return operation.signature().op == OpKind::kJoin
             ? std::max(operation.pending_since, set.last_event())
             : operation.pending_since;
}

// Since when the operation has been pending that has been for longest.
std::optional<RunningTime> StallInspector::oldest_wait() const {
  std::optional<RunningTime> oldest;
  const auto note = [&](RunningTime since) { oldest = std::min(oldest.value_or(since), since); };
  for (const ProcessSet& set : registry_.sets()) {
    for (const auto& [identity, operation] : set.pending()) {
      if (operation->handle == 0) continue;  // nobody waits for it
      note(waiting_since(set, *operation));
    }
  }
  for (const auto& [handle, operation] : point_to_point_.waiting()) {
    note(operation->pending_since);
  }
  return oldest;
}

void StallInspector::check(RunningTime now) {
  if (peers_.any_departed()) return check_without_inspection(now);
  const RunningTime oldest = oldest_wait().value_or(now);
  const Seconds wait = now - oldest;
  if (wait >= interval()) {
    request_since(oldest);
    if (const auto own = own_group()) own->ask();
  }
  for (const auto& group : groups()) requested_for_groups_ |= group->take_request();
  const RunningTime since =
      std::min(std::exchange(requested_since_, std::nullopt).value_or(now), now);
  // An operation that becomes overdue between two inspections does not wait for the second one.
  const RunningTime overdue_at = since + overdue_time();
  const bool is_overdue = now >= overdue_at && next_at_ - interval() < overdue_at;
  if ((requested_ || requested_for_groups_) && (now >= next_at_ || is_overdue)) {
    begin(since, now);
  } else if (now >= next_at_ + interval()) {
    asked_parent_at_.reset();  // nobody waits any more
  }
  check_parent(now);
  check_answers(now);
  // The root judges for all ranks. This is for the case that it does not.
  if (wait >= overdue_time() + 2 * interval() + Seconds(5)) {
    throw Error(HP_TIMEOUT, "an operation has been waiting for " + describe_seconds(wait) +
                                " and rank 0 does not say for whom");
  }
}

void StallInspector::begin(RunningTime since, RunningTime now) {
  const bool for_groups = !std::exchange(requested_, false);
  requested_for_groups_ = false;
  next_at_ = now + interval();
  if (!position_.is_root()) {
    mesh_.send_control(position_.parent, encode(InspectionRequest{now - since, for_groups}));
    // If the wait has begun since, the parent was asked about an earlier one.
    if (!for_groups && (!asked_parent_at_ || *asked_parent_at_ < since)) {
      asked_parent_at_ = silence_begins(since, now);
    }
    return;
  }
  // One that other groups have begun may last, because a rank is stopped that they do not need.
  if (!inspection_.running() || (is_for_groups_ && !for_groups)) {
    begun_at_ = silence_begins(since, now);
    is_for_groups_ = for_groups;
  }
  inspection_.begin(quiet_time());
}

// Since when ranks that do not answer count as silent: from the begin of the wait on, before which
// nobody asked them anything, or from now on if they have answered during the wait.
RunningTime StallInspector::silence_begins(RunningTime since, RunningTime now) const {
  if (since <= heard_at_) return now;
  // The first question follows an interval after that, or a little later. An answer has time.
  return std::max(since, now - 1.5 * interval());
}

void StallInspector::run() {
  if (const auto own = own_group()) {
    for (const CallOff& call_off : own->take_call_offs()) obey(call_off);
  }
  while (inspection_.wants_answer()) inspection_.answer(report_of_this_rank());
  for (auto& message : inspection_.take_outgoing()) {
    mesh_.send_control(message.to, std::move(message.message));
  }
  if (auto result = inspection_.take_result()) {
    begun_at_.reset();
    heard_at_ = clock_.now();
    judge(*result, heard_at_);
  }
}

RankReport StallInspector::report_of_this_rank() {
  const SteadyTime steady = steady_now();
  const RunningTime now = clock_.now();
  RankReport report;
  report.rank = config_.rank;
  report.quiet = age(activity_.last_event, steady);
  // A thread that waits in any of the groups is blocked, since the operations of all are reported.
  const Seconds least = quiet_time() / 2;
  std::vector<std::vector<CallerThreads::State>> threads{handles_.threads(steady, least)};
  for (const auto& group : groups()) {
    threads.push_back(group->handles->threads(steady, least));
    add_group(*group, steady, report);
  }
  report.busy_threads = static_cast<std::uint32_t>(CallerThreads::busy(threads));
  for (const ProcessSet& set : registry_.sets()) {
    report.executing |= !set.executor().idle();
    for (const auto& [identity, operation] : set.pending()) {
      if (operation->handle == 0) continue;
      operation->reported = true;
      report.pending.push_back(
          {set.number(), identity->name, age(waiting_since(set, *operation), now),
           handles_.awaited(*operation, steady), operation->signature().op == OpKind::kJoin, -1});
    }
  }
  report.executing |= !point_to_point_.idle();
  for (const auto& [handle, operation] : point_to_point_.waiting()) {
    report.pending.push_back({.set = operation->members->set,
                              .name = name_of_transfer(*operation, config_.rank),
                              .age = age(operation->pending_since, now),
                              .waited = handles_.awaited(*operation, steady),
                              .peer = operation->signature().root});
  }
  return report;
}

// The operations that this rank has submitted to a group. Their states may be newer than those of
// the threads, which were asked first: a thread that has begun to wait since then is counted as one
// that may submit.
void StallInspector::add_group(const AttachedGroup& group, SteadyTime now,
                               RankReport& report) const {
  const auto here = [&](int rank) { return group.ranks.at(static_cast<std::size_t>(rank)); };
  for (const auto& [operation, identity] : group.handles->pending()) {
    const OpKind kind = identity->signature.op;
    // Who has joined is not known here.
    report.executing |= kind == OpKind::kJoin || operation->decided;
    if (operation->decided) continue;
    operation->reported = true;
    RankReport::Pending pending{.set = operation->members->set,
                                .name = identity->name,
                                .age = age(operation->submitted_at, now),
                                .waited = group.handles->awaited(*operation, now),
                                .group = group.name};
    for (const int rank : operation->members->ranks) pending.members.push_back(here(rank));
    if (is_point_to_point(kind)) {
      const int self =
          operation->members->ranks[static_cast<std::size_t>(operation->members->index)];
      pending.name = name_of_transfer(*operation, self);
      const int peer = identity->signature.root;
      if (peer != PointToPointMatcher::kAnyRank) pending.peer = here(peer);
    }
    report.pending.push_back(std::move(pending));
  }
  // Afterwards: whatever has ended meanwhile, and is not reported, is an event.
  report.quiet = std::min(report.quiet, age(group.handles->last_event(), now));
}

void StallInspector::judge(const Report& report, RunningTime now) {
  const auto members = registry_.ranks_by_set();
  const Diagnosis diagnosis =
      diagnose(report, {.members = members,
                        .stall_time = config_.options.stall_check_time.get(),
                        .finds_deadlocks = config_.options.deadlock_time.get() < kForever,
                        .overdue_time = overdue_time()});
  if (diagnosis.overdue) {
    throw Error(HP_TIMEOUT, *diagnosis.overdue + gave_up(operation_limit(config_.options)));
  }
  if (diagnosis.deadlock) return call_off(diagnosis, members);
  if (diagnosis.possible_deadlock) warn_of_deadlock(*diagnosis.possible_deadlock, now);
  warn_of(diagnosis.stalls, now);
}

// Once, also if warnings of stalls are disabled, and again after each check time.
void StallInspector::warn_of_deadlock(const std::string& text, RunningTime now) {
  const Seconds check = config_.options.stall_check_time.get();
  if (last_deadlock_warning_ && now - *last_deadlock_warning_ < check) return;
  last_deadlock_warning_ = now;
  config_.log(LogLevel::kWarning, text);
}

void StallInspector::call_off(const Diagnosis& diagnosis,
                              const std::map<std::uint32_t, std::vector<int>>& members) {
  config_.log(LogLevel::kError, *diagnosis.deadlock);
  const Status status{HP_DEADLOCK, *diagnosis.deadlock};
  for (const std::uint32_t set : diagnosis.deadlocked_sets) {
    fail_set(set, members.at(set).front(), status);
  }
  for (const auto& [operation, rank] : diagnosis.deadlocked_elsewhere) {
    const CallOff call_off{operation, {status.code, status.message}};
    if (rank == config_.rank) {
      receive(call_off);
    } else {
      mesh_.send_control(rank, encode(call_off));
    }
  }
}

void StallInspector::fail_set(std::uint32_t set, int root, const Status& status) {
  if (root == config_.rank) {
    registry_.find(set)->fail_all(status);
  } else {
    mesh_.send_control(root, encode(MessageKind::kFail, set, Abort{status.code, status.message}));
  }
}

void StallInspector::receive(const CallOff& call_off) {
  for (const auto& group : groups()) {
    if (group->name == call_off.operation.group) group->call_off(call_off);
  }
}

// In the group's engine. If the operation has ended, so has the deadlock, and other operations are
// not to blame.
void StallInspector::obey(const CallOff& call_off) {
  if (!is_pending(call_off.operation)) return;
  const std::uint32_t set = call_off.operation.set;
  fail_set(set, registry_.find(set)->members()->ranks.front(),
           {call_off.failure.code, call_off.failure.text});
}

bool StallInspector::is_pending(const OperationKey& key) const {
  const ProcessSet* const set = registry_.find(key.set);
  if (set == nullptr) return false;
  if (set->pending().contains(key.name)) return true;
  for (const auto& [ticket, operation] : point_to_point_.waiting()) {
    if (operation->members->set == key.set &&
        name_of_transfer(*operation, config_.rank) == key.name) {
      return true;
    }
  }
  return false;
}

// One line for each operation that stalls, repeated once per check time.
void StallInspector::warn_of(const std::vector<Diagnosis::Stall>& stalls, RunningTime now) {
  const Seconds check = config_.options.stall_check_time.get();
  std::map<std::pair<std::uint32_t, std::string>, RunningTime> warned;
  for (const auto& stall : stalls) {
    const auto key = std::make_pair(stall.set, stall.name);
    const auto last = warned_.find(key);
    const bool due = last == warned_.end() || now - last->second >= check;
    warned[key] = due ? now : last->second;
    if (due) config_.log(LogLevel::kWarning, "stalled: " + stall.text);
  }
  warned_ = std::move(warned);
}

// Ranks that have left do not report. What can still wait are sends and recvs, each for its peer:
// it may take any time to submit its part, up to the limit of an operation, but has to answer.
void StallInspector::check_without_inspection(RunningTime now) {
  const Limit progress = progress_limit(config_.options);
  for (const auto& [handle, operation] : point_to_point_.waiting()) {
    std::vector<int> ranks{operation->signature().root};
    if (ranks.front() == PointToPointMatcher::kAnyRank) ranks = operation->members->ranks;
    std::erase_if(ranks,
                  [&](int rank) { return rank == config_.rank || peers_.has_departed(rank); });
    const Seconds wait = now - operation->pending_since;
    const auto give_up = [&](const std::string& blamed, const Limit& passed) {
      throw Error(HP_TIMEOUT, name_of_transfer(*operation, config_.rank) +
                                  " has been waiting for " + blamed + " for " +
                                  describe_seconds(wait) + " (submitted by rank " +
                                  std::to_string(config_.rank) + ")" + gave_up(passed));
    };
    const auto finding = suspicion_.examine(ranks, wait, progress.time, now);
    if (finding.is_late && !finding.silent.empty()) give_up(finding.describe_silent(), progress);
    if (wait >= overdue_time()) {
      give_up(describe_ranks(ranks), operation_limit(config_.options));
    }
  }
}

// Its parent forwards an inspection at once, unless its process is stopped or waits for its own
// parent, which it then checks likewise.
void StallInspector::check_parent(RunningTime now) {
  if (!asked_parent_at_) return;
  const Limit progress = progress_limit(config_.options);
  const auto finding =
      suspicion_.examine({position_.parent}, now - *asked_parent_at_, progress.time, now);
  if (finding.is_late && !finding.silent.empty()) fail_pending(finding, progress);
}

void StallInspector::fail_pending(const Suspicion::Finding& finding, const Limit& progress) {
  throw Error(HP_TIMEOUT, "an operation has been pending for " + describe_seconds(progress.time) +
                              ", waiting for " + finding.describe_silent() + gave_up(progress));
}

// Root: other ranks may not answer.
void StallInspector::check_answers(RunningTime now) {
  if (!begun_at_ || !inspection_.running() || is_for_groups_) return;
  const Seconds silence = now - *begun_at_;
  const Limit progress = progress_limit(config_.options);
  const Seconds check = config_.options.stall_check_time.get();
  const std::vector<int> ranks = inspection_.unanswered();
  const auto finding = suspicion_.examine(ranks, silence, std::min(check, progress.time), now);
  // The answers of the ranks below one that does not answer are missing, too.
  const std::vector<int>& blamed = finding.silent.empty() ? ranks : finding.silent;
  const std::string text = describe_ranks(blamed) + " did not answer for " +
                           describe_seconds(silence) + " while other ranks wait for an operation";
  if (silence >= overdue_time()) {
    throw Error(HP_TIMEOUT, text + gave_up(operation_limit(config_.options)));
  }
  // Ranks that answer may take any time to submit an operation. One that is stopped has the limit
  // of a transfer, like one that stops while a batch runs.
  if (silence >= progress.time && !finding.silent.empty()) fail_pending(finding, progress);
  if (silence < check || (last_silence_warning_ && now - *last_silence_warning_ < check)) return;
  last_silence_warning_ = now;
  config_.log(LogLevel::kWarning, "stalled: " + text);
}

}  // namespace horoplug
