// What the engine does about things that take too long: transfers that stand still, operations that
// some ranks have not submitted, ranks that do not answer, and jobs in which everybody waits for
// somebody else.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

#include "collectives/gpu/gpu_group.h"
#include "controller/messages.h"
#include "engine/engine.h"

namespace horoplug {
namespace {

// Seconds that a plan may stand still: while a thread of this rank waits for what the plan holds
// up, and while peers have not joined a batch that this rank has.
constexpr double kPatienceOfWaiters = 0.002;
constexpr double kPatienceWithPeers = 1.0;
constexpr double kMostPatience = 5.0;

std::string whole_seconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", seconds);
  return text;
}

}  // namespace

double Engine::overdue_time() const {
  return std::fmin(or_never(config_.options.stall_shutdown_time),
                   or_never(config_.options.operation_timeout));
}

// How often a wait that goes on is looked into.
double Engine::inspection_interval() const {
  const double first = std::fmin(std::fmin(or_never(config_.options.deadlock_time),
                                           or_never(config_.options.stall_check_time)),
                                 overdue_time());
  return std::clamp(first / 2, 0.05, 30.0);
}

// A join waits for as long as the others have data, which is no stall: it counts from the last sign
// that they have.
double Engine::waiting_since(const Operation& operation) const {
  return operation.signature.op == OpKind::kJoin ? std::fmax(operation.submitted_at, last_event_)
                                                 : operation.submitted_at;
}

double Engine::oldest_wait() const {
  double oldest = kNever;
  for (const auto& [id, set] : sets_) {
    for (const auto& [name, operation] : set->pending) {
      oldest = std::fmin(oldest, waiting_since(*operation));
    }
  }
  return std::isinf(oldest) ? 0 : steady_now() - oldest;
}

void Engine::watch() {
  const double time = steady_now();
  // A process that was stopped, or starved of its core, must not hold the lost time against its
  // peers.
  const double gap = time - last_watch_;
  if (gap > 1.0) {
    for (auto& [id, set] : sets_) {
      set->last_progress += gap;
      if (GpuGroup* const gpu = set->executor.gpu()) gpu->excuse(gap);
    }
    if (inspection_begun_ > 0) inspection_begun_ += gap;
    if (state_ == State::kStarting) started_at_ += gap;
  }
  last_watch_ = time;
  if (state_ == State::kStarting) {
    watch_handshake();
  } else {
    bool late = watch_transfers();
    late |= watch_gpus();
    late |= inspection_is_late();
    check_liveness(late);
    nudge();
    watch_plans();
    watch_pending();
  }
}

void Engine::watch_handshake() const {
  const double limit = or_never(config_.options.data_timeout);
  if (steady_now() - started_at_ < limit) return;
  std::vector<int> missing;
  for (std::size_t rank = 0; rank < hellos_.size(); ++rank) {
    if (!hellos_[rank]) missing.push_back(static_cast<int>(rank));
  }
  throw Error(HP_TIMEOUT, "no answer from " + describe_ranks(missing) + " within " +
                              whole_seconds(limit) + " of the start");
}

bool Engine::watch_transfers() {
  const double time = steady_now();
  // Nudges and inspections are no progress.
  const std::uint64_t data = mesh_->data_moved();
  const bool moved = std::exchange(last_data_moved_, data) != data;
  const double limit = or_never(config_.options.data_timeout);
  const bool framework_is_busy = gpu_has_not_begun();
  bool late = false;
  for (auto& [id, set] : sets_) {
    // Who looks at the GPU waits for what the framework has given it to do.
    const bool waits_for_it = framework_is_busy && set->executor.polled();
    if ((set->executor.idle() && !set->removal) || moved || waits_for_it) {
      set->last_progress = time;
    }
    late |= time - set->last_progress >= limit / 2;
    if (time - set->last_progress < limit) continue;
    const Batch* running = set->executor.running();
    throw Error(HP_TIMEOUT, (running != nullptr ? running->describe() : set->removal->describe()) +
                                " has made no progress for " + whole_seconds(limit) +
                                ", waiting for " + whom_it_waits_for(*set) +
                                " (HOROVOD_GLOO_TIMEOUT_SECONDS sets this limit)");
  }
  return late;
}

// While something is late, so that who waits too long for others knows who answers.
void Engine::check_liveness(bool late) {
  if (!late) {
    liveness_.end();
  } else if (!liveness_.running()) {
    liveness_.begin(mesh_->size(), config_.rank);
    mesh_->send_control_to_all(encode_ping());
  }
}

// "rank 1, which does not answer"; empty: all of these answer.
std::string Engine::who_is_silent(std::vector<int> ranks) const {
  std::erase(ranks, config_.rank);
  const std::vector<int> silent = liveness_.silent(std::move(ranks));
  if (silent.empty()) return {};
  return describe_ranks(silent) + (silent.size() == 1 ? ", which does" : ", which do") +
         " not answer";
}

// The ranks that keep a set from going on. Those that this rank waits for may wait, too: if there
// are some that do not answer, it is those.
std::string Engine::whom_it_waits_for(const ProcessSet& set) const {
  // A batch that takes turns may wait for those of other sets, and so for any rank.
  const Batch* const running = set.executor.running();
  const bool takes_turns = running != nullptr && running->turns != nullptr;
  const std::vector<int>& ranks = (takes_turns ? *sets_.at(0) : set).members->ranks;
  if (std::string silent = who_is_silent(ranks); !silent.empty()) return silent;
  if (running != nullptr) return describe_ranks(set.executor.blame());
  std::vector<int> others = ranks;
  std::erase(others, config_.rank);
  return describe_ranks(others);
}

// On a GPU, nobody knows for whom it waits.
bool Engine::watch_gpus() {
  const double limit = or_never(config_.options.data_timeout);
  bool late = false;
  for (auto& [id, set] : sets_) {
    GpuGroup* const gpu = set->executor.gpu();
    const double seconds = gpu != nullptr ? gpu->standstill(steady_now()) : 0;
    late |= seconds >= limit / 2;
    if (seconds < limit) continue;
    const std::string silent = who_is_silent(sets_.at(0)->members->ranks);
    throw Error(HP_TIMEOUT, gpu->next() + " has not ended on the GPU for " + whole_seconds(limit) +
                                (silent.empty() ? ", though all ranks answer" : ", waiting for ") +
                                silent + " (HOROVOD_GLOO_TIMEOUT_SECONDS sets this limit)");
  }
  return late;
}

// MPI moves data only while it is called, also what it has taken over already, and a rank that has
// nothing to do calls nothing. So who waits for long says so to those it waits for, at times that
// grow apart, and they take one look.
void Engine::nudge() {
  constexpr double kFirst = 0.01;
  constexpr double kMostApart = 1.0;
  constexpr std::size_t kMost = 8;  // at a time; after all, most of them will wait, too
  if (!must_poll()) return;
  const double time = steady_now();
  const double nudged = nudged_at_ - quiet_since_;  // negative: not in this wait
  const double next = nudged < 0 ? kFirst : std::fmin(2 * nudged, nudged + kMostApart);
  if (time - quiet_since_ < next) return;
  nudged_at_ = time;
  for (const auto& [id, set] : sets_) {
    const std::vector<int> ranks = set->executor.blame();
    for (std::size_t i = 0; i < std::min(ranks.size(), kMost); ++i) {
      const int rank = ranks[nudges_++ % ranks.size()];
      if (rank != config_.rank) mesh_->send_control(rank, encode_wake_up());
    }
  }
}

// How long a plan may stand still, from the last event of its set on, before it is given up; for
// ever if it does not.
double Engine::plan_patience(const ProcessSet& set) const {
  if (set.negotiator.waits_in_plan()) {
    // Peers are late, and may be so for good reasons, which only negotiation finds out.
    return std::fmin(kPatienceWithPeers, or_never(config_.options.data_timeout) / 4);
  }
  if (!set.negotiator.held_up()) return kNever;
  const double time = steady_now();
  for (const auto& [name, operation] : set.pending) {
    if (handles_.waited_for(*operation, time)) return kPatienceOfWaiters;
  }
  return set.plan_patience;
}

void Engine::watch_plans() {
  const double time = steady_now();
  for (auto& [id, set] : sets_) {
    if (!set->negotiator.has_plan()) continue;
    const bool held_up = set->negotiator.held_up();
    const double since = held_up ? set->last_event : std::fmax(set->last_event, set->last_progress);
    if (time - since < plan_patience(*set)) continue;
    // Perhaps it was only slow: the next plan has more time.
    if (held_up) {
      set->plan_patience = std::fmin(2 * set->plan_patience, kMostPatience);
    }
    set->negotiator.break_plan();
  }
}

void Engine::watch_pending() {
  const double time = steady_now();
  const double wait = oldest_wait();
  if (wait >= inspection_interval()) inspection_requested_ = true;
  if (inspection_requested_ && time >= next_inspection_) {
    inspection_requested_ = false;
    next_inspection_ = time + inspection_interval();
    if (sets_.at(0)->negotiator.is_root()) {
      if (!stall_inspection_->running()) inspection_begun_ = time;
      stall_inspection_->begin();
    } else {
      mesh_->send_control(sets_.at(0)->negotiator.position().parent, encode_inspection_request());
    }
  }
  judge_silence();
  // The root speaks for everyone; this is for when it does not.
  if (wait >= overdue_time() + 2 * inspection_interval() + 5) {
    throw Error(HP_TIMEOUT, "an operation has been waiting for " + whole_seconds(wait) +
                                " and rank 0 does not say for whom");
  }
}

void Engine::run_inspection() {
  if (!stall_inspection_) return;
  if (stall_inspection_->wants_answer()) stall_inspection_->answer(report_of_this_rank());
  for (auto& message : stall_inspection_->take_outgoing()) {
    mesh_->send_control(message.to, std::move(message.message));
  }
  if (auto result = stall_inspection_->take_result()) {
    inspection_begun_ = 0;
    judge(*result);
  }
}

RankReport Engine::report_of_this_rank() const {
  const double time = steady_now();
  RankReport report;
  report.rank = config_.rank;
  report.quiet = std::fmax(0, time - last_event_);
  for (const auto& [id, set] : sets_) {
    report.executing |= !set->executor.idle();
    for (const auto& [name, operation] : set->pending) {
      report.pending.push_back({id, name, std::fmax(0, time - waiting_since(*operation)),
                                handles_.waited_for(*operation, time),
                                operation->signature.op == OpKind::kJoin});
    }
  }
  return report;
}

void Engine::judge(const Report& report) {
  const EngineOptions& options = config_.options;
  const double overdue = overdue_time();
  std::map<std::uint32_t, std::vector<int>> members;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [number, known] : known_sets_) members[number] = known.members->ranks;
  }
  const Diagnosis diagnosis =
      diagnose(report, {.members = members,
                        .stall_time = options.stall_check_time,
                        .deadlock_time = options.deadlock_time,
                        .overdue_time = std::isinf(overdue) ? -1 : overdue});
  if (diagnosis.overdue) {
    throw Error(HP_TIMEOUT, *diagnosis.overdue +
                                "; giving up (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS and "
                                "HOROPLUG_OPERATION_TIMEOUT_SECONDS set the limit)");
  }
  if (diagnosis.deadlock) {
    log_(LogLevel::kError, *diagnosis.deadlock);
    for (const std::uint32_t set : diagnosis.deadlocked_sets) {
      const int root = members.at(set).front();
      if (root == config_.rank) {
        sets_.at(set)->negotiator.fail_all({HP_DEADLOCK, *diagnosis.deadlock});
      } else {
        mesh_->send_control(root, encode_fail(set, {HP_DEADLOCK, *diagnosis.deadlock}));
      }
    }
    return;
  }
  // One line for every operation that stalls, repeated once per check time.
  std::map<std::pair<std::uint32_t, std::string>, double> warned;
  for (const auto& stall : diagnosis.stalls) {
    const auto key = std::make_pair(stall.set, stall.name);
    const auto last = stall_warned_.find(key);
    const bool due =
        last == stall_warned_.end() || steady_now() - last->second >= options.stall_check_time;
    warned[key] = due ? steady_now() : last->second;
    if (due) log_(LogLevel::kWarning, "stalled: " + stall.text);
  }
  stall_warned_ = std::move(warned);
}

bool Engine::inspection_is_late() const {
  const double limit = std::fmin(or_never(config_.options.stall_check_time), overdue_time());
  return inspection_begun_ > 0 && stall_inspection_->running() &&
         steady_now() - inspection_begun_ >= limit / 2;
}

void Engine::judge_silence() {
  if (inspection_begun_ == 0 || !stall_inspection_->running()) return;
  const double silence = steady_now() - inspection_begun_;
  std::vector<int> ranks = stall_inspection_->unanswered();
  // Of those below a rank that does not answer, a tree hears nothing either.
  if (std::vector<int> silent = liveness_.silent(ranks); !silent.empty()) ranks = silent;
  const std::string text = describe_ranks(ranks) + " did not answer for " + whole_seconds(silence) +
                           " while other ranks wait for an operation";
  if (silence >= overdue_time()) throw Error(HP_TIMEOUT, text + "; giving up");
  const double check = config_.options.stall_check_time;
  if (check < 0 || silence < check || steady_now() - last_silence_warning_ < check) return;
  last_silence_warning_ = steady_now();
  log_(LogLevel::kWarning, "stalled: " + text);
}

}  // namespace horoplug
