#include "engine/engine.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "controller/messages.h"
#include "engine/submission.h"
#include "transport/mpi/mpi_stream.h"

namespace horoplug {
Engine::Engine(EngineConfig config)
    : config_(std::move(config)),
      log_(config_.log),
      tracing_(config_.rank, config_.log),
      tuning_log_(config_.options.autotune_log, config_.log) {
  const int rank = config_.rank;
  if (config_.size() < 1 || rank < 0 || rank >= config_.size()) {
    throw Error(HP_INVALID_ARGUMENT,
                "rank " + std::to_string(rank) + " of a job of " + std::to_string(config_.size()));
  }
  std::vector<std::vector<std::unique_ptr<Stream>>> lanes(config_.members.size());
  for (int peer = 0; peer < config_.size(); ++peer) {
    auto& member = config_.members[static_cast<std::size_t>(peer)];
    if (peer != rank && !member.stream) {
      throw Error(HP_INVALID_ARGUMENT, "no connection to rank " + std::to_string(peer));
    }
    if (peer == rank) continue;
    auto& to_peer = lanes[static_cast<std::size_t>(peer)];
    to_peer.push_back(std::move(member.stream));
    for (auto& lane : member.lanes) to_peer.push_back(std::move(lane));
    const int here = config_.members[static_cast<std::size_t>(rank)].host;
    if (config_.mpi && member.host != here) {
      to_peer.push_back(std::make_unique<MpiStream>(config_.mpi, peer));
    }
  }
  auto& self = config_.members[static_cast<std::size_t>(rank)];
  if (!self.doorbell) self.doorbell = std::make_shared<Doorbell>();
  doorbell_ = self.doorbell;
  mesh_ = std::make_unique<Mesh>(std::move(lanes), doorbell_, [this](int from, Bytes bytes) {
    receive(from, std::move(bytes));
  });
  hellos_.resize(config_.members.size());
  departed_.resize(config_.members.size(), false);
  segment_ends_.resize(config_.members.size(), Arena::kSegmentBytes);
  started_at_ = last_event_ = last_watch_ = steady_now();
  int ranks_here = 0;
  for (const Member& member : config_.members) ranks_here += member.host == self.host ? 1 : 0;
  loop_ = std::make_unique<ProgressLoop<Engine>>(*this, *mesh_, *doorbell_,
                                                 has_fewer_processors_than(ranks_here));
  begin_handshake();
  loop_->start();
  const int cpu = config_.options.progress_cpu;
  if (cpu >= 0 && !loop_->pin_to(cpu)) {
    log_(LogLevel::kWarning, "cannot run the progress thread on CPU " + std::to_string(cpu) +
                                 " (HOROVOD_THREAD_AFFINITY); it runs on any CPU");
  }
}

Engine::~Engine() {
  shutdown();
  loop_->join();
}

void Engine::wait_until_ready() {
  std::unique_lock lock(mutex_);
  state_changed_.wait(lock, [this] { return state_ != State::kStarting; });
  if (state_ == State::kStopped) throw Error(end_status_.code, end_status_.message);
}

hp_handle Engine::submit(OperationPtr operation) {
  mark_ready({&operation, 1});
  bool wakes;
  {
    std::lock_guard lock(mutex_);
    admit(operation);
    wakes = queue_submissions();
  }
  if (wakes) doorbell_->ring();
  return operation->handle;
}

Status Engine::submit_all(const std::vector<OperationPtr>& operations) {
  Status refused;
  bool wakes;
  mark_ready(operations);
  {
    std::lock_guard lock(mutex_);
    try {
      for (const OperationPtr& operation : operations) admit(operation);
    } catch (const Error& error) {
      refused = error.status();
    }
    wakes = queue_submissions();
  }
  if (wakes) doorbell_->ring();
  return refused;
}

// Under the lock: there are new submissions. Whether somebody must wake up for them.
bool Engine::queue_submissions() {
  submissions_waiting_.store(true);
  if (submissions_.size() < submissions_wanted_) return false;
  requests_waiting_.store(true);
  return true;
}

// How many submissions it takes from here on to change anything. True if they are there already.
bool Engine::set_submissions_wanted() {
  std::size_t wanted = std::numeric_limits<std::size_t>::max();
  for (const auto& [id, set] : sets_) {
    wanted = std::min(wanted, set->negotiator.submissions_wanted());
  }
  if (wanted == last_wanted_) return false;
  last_wanted_ = wanted;
  std::lock_guard lock(mutex_);
  submissions_wanted_ = wanted;
  if (submissions_.empty() || submissions_.size() < wanted) return false;
  requests_waiting_.store(true);
  return true;
}

Status Engine::poll(hp_handle handle) {
  const Status status = handles_.poll(handle);
  if (status.code == HP_IN_PROGRESS) announce();
  return status;
}

// Nobody waits for it, so that it must not lie in the queue until others have come.
void Engine::on_done(hp_handle handle, hp_done done, void* context) {
  if (handles_.on_done(handle, done, context)) announce();
}

// Somebody wants to see what has been submitted done.
void Engine::announce() {
  if (!submissions_waiting_.load() || requests_waiting_.exchange(true)) return;
  doorbell_->ring();
}

// Under the lock. Throws Error if the operation cannot be submitted now.
void Engine::admit(const OperationPtr& operation) {
  if (!end_status_.ok()) {
    throw Error(end_status_.code, operation->describe() + " cannot run: " + end_status_.message);
  }
  const OpKind kind = operation->signature.op;
  const auto known = known_sets_.find(operation->members->set);
  if (known == known_sets_.end()) {
    throw Error(HP_INVALID_ARGUMENT,
                operation->describe() + " cannot run: the process set was removed");
  }
  if (!known->second.end.ok()) {
    throw Error(known->second.end.code,
                operation->describe() + " cannot run: " + known->second.end.message);
  }
  if (known->second.joined) {
    throw Error(HP_INVALID_ARGUMENT, operation->describe() +
                                         " cannot run: this rank has joined, and waits until "
                                         "every rank has called join()");
  }
  if (operation->name.empty()) {
    operation->name = std::string(op_kind_name(kind)) + ".noname." +
                      std::to_string(++unnamed_[{operation->members->set, kind}]);
  }
  if (!in_flight_.insert(operation->key()).second) {
    throw Error(HP_DUPLICATE_NAME,
                operation->describe() +
                    " is still in flight; wait for it before you submit another operation of the "
                    "same name, or give this one another name");
  }
  known->second.joined = kind == OpKind::kJoin;
  if (std::exchange(observations_seen_, handles_.result_observations()) != observations_seen_)
    ++dependency_epoch_;
  operation->dependency_epoch = dependency_epoch_;
  operation->buffer = buffer_of(*operation);
  operation->submitted_at = steady_now();
  handles_.add(operation);
  submissions_.push_back(operation);
}

void Engine::shutdown() {
  {
    std::unique_lock lock(mutex_);
    leave_requested_ = true;
    if (end_status_.ok())
      end_status_ = {HP_SHUT_DOWN, "this rank has shut down; call init() again"};
    requests_waiting_.store(true);
  }
  doorbell_->ring();
  std::unique_lock lock(mutex_);
  state_changed_.wait(lock, [this] { return state_ == State::kStopped; });
}

void Engine::abort(const std::string& reason) {
  {
    std::lock_guard lock(mutex_);
    abort_requested_ = reason;
    requests_waiting_.store(true);
  }
  doorbell_->ring();
}

hp_stats Engine::stats() const {
  hp_stats stats{};
  stats.struct_size = sizeof stats;
  stats.batches = counters_.batches;
  stats.tensors = counters_.tensors;
  stats.bytes = counters_.bytes;
  stats.control_messages = counters_.control_messages;
  stats.control_bytes = counters_.control_bytes;
  stats.cached_names = counters_.cached_names;
  stats.wakeups = loop_->wakeups();
  stats.planned_batches = counters_.planned_batches;
  stats.broken_plans = counters_.broken_plans;
  stats.failed = counters_.failed;
  return stats;
}

Status Engine::wait(hp_handle handle, double timeout) {
  HandleTable::Wait wait(handles_, handle);
  if (wait.done()) return wait.status();
  if (timeout != 0 && loop_->acquire()) {
    loop_->run_until_done(wait, timeout);
  } else {
    announce();
    wait.sleep(timeout);
  }
  return wait.status();
}

Status Engine::perform(const OperationPtr& operation, double timeout) {
  if (!loop_->acquire()) {
    submit(operation);
    return wait(operation->handle, timeout);
  }
  try {
    mark_ready({&operation, 1});
    std::lock_guard lock(mutex_);
    admit(operation);
    requests_waiting_.store(true);
  } catch (...) {
    loop_->release();
    throw;
  }
  HandleTable::Wait wait(handles_, operation->handle);
  loop_->run_until_done(wait, timeout);
  return wait.status();
}

// ---- the thread that runs the loop ----

bool Engine::has_running_batch() const {
  return std::any_of(sets_.begin(), sets_.end(),
                     [](const auto& set) { return set.second->executor.running() != nullptr; });
}

double Engine::watch_interval() const { return std::fmin(inspection_interval() / 4, 0.25); }

bool Engine::must_poll() const {
  bool polls = mesh_->must_poll() || !removed_sets_.empty();
  for (const auto& [id, set] : sets_) {
    const bool ends = leaving_ || set->removal;
    polls |= set->executor.polled() || (ends && set->executor.gpu() != nullptr);
  }
  return polls;
}

// Polling becomes rarer the longer the wait lasts: a completion is noticed late by a small part of
// the time that it took.
double Engine::poll_interval() const {
  constexpr double kPart = 1.0 / 16;
  constexpr double kLeast = 20e-6;
  constexpr double kMost = 5e-3;
  return std::clamp(kPart * (steady_now() - quiet_since_), kLeast, kMost);
}

double Engine::sleep_seconds() const {
  bool waiting =
      state_ == State::kStarting || leaving_ || (stall_inspection_ && stall_inspection_->running());
  for (const auto& [id, set] : sets_) {
    waiting |= !set->pending.empty() || !set->executor.idle() || set->removal;
  }
  waiting |= gpu_is_busy();
  const bool polls = must_poll();
  // Peers report every other failure.
  if (!waiting && !polls) return -1;
  double seconds = watch_interval();
  if (polls) seconds = std::fmin(seconds, poll_interval());
  for (const auto& [id, set] : sets_) seconds = std::fmin(seconds, plan_patience(*set));
  return seconds;
}

bool Engine::step() {
  bool busy = mesh_->pump();
  check_links();
  busy |= take_requests();
  busy |= negotiate();
  busy |= set_submissions_wanted();
  busy |= execute();
  busy |= finish_removals();
  busy |= mesh_->pump_writes();
  if (leaving_) busy |= advance_leaving();
  if (mesh_->take_polled_traffic()) quiet_since_ = steady_now();
  return busy;
}

bool Engine::take_requests() {
  if (!requests_waiting_.load() && !submissions_waiting_.load()) return false;
  std::vector<OperationPtr> submissions;
  std::optional<std::string> abort_reason;
  {
    std::lock_guard lock(mutex_);
    // Before the handshake is over there is nobody to negotiate with; they are taken up then.
    if (state_ == State::kStarting && !abort_requested_ && !leave_requested_) {
      requests_waiting_.store(false);
      return false;
    }
    submissions.swap(submissions_);
    abort_reason.swap(abort_requested_);
    leaving_ |= leave_requested_;
    requests_waiting_.store(false);
    submissions_waiting_.store(false);
  }
  for (const OperationPtr& operation : submissions) submit_here(operation);
  if (abort_reason) {
    throw Error(HP_ABORTED,
                "rank " + std::to_string(config_.rank) + " has aborted the job: " + *abort_reason);
  }
  return true;
}

void Engine::submit_here(const OperationPtr& operation) {
  const auto found = sets_.find(operation->members->set);
  last_event_ = steady_now();
  if (found == sets_.end()) {
    end_operations({operation}, {HP_INVALID_ARGUMENT, "the process set was removed"});
    return;
  }
  ProcessSet& set = *found->second;
  set.last_event = last_event_;
  if (set.negotiator.closed()) {
    end_operations({operation}, set.negotiator.end());
    return;
  }
  tracing_.submitted(*operation);
  set.pending.emplace(operation->name, operation);
  if (operation->signature.op == OpKind::kJoin) {
    set.negotiator.join();
  } else {
    set.negotiator.submit(operation->name, operation->signature, operation->dependency_epoch);
  }
}

bool Engine::negotiate() {
  bool busy = false;
  std::size_t cached_names = 0;
  for (auto& [id, set] : sets_) {
    set->negotiator.flush();
    for (auto& message : set->negotiator.take_outgoing()) {
      mesh_->send_control(message.to, std::move(message.message));
      busy = true;
    }
    auto decisions = set->negotiator.take_decisions();
    tracing_.cycle(*set, decisions.size());
    for (auto& decision : decisions) busy |= apply(*set, decision);
    for (const Trial& trial : set->negotiator.take_trials()) tuning_log_.write(id, trial);
    cached_names += set->negotiator.cached_names();
  }
  counters_.cached_names = cached_names;
  run_inspection();
  counters_.control_messages = mesh_->control_messages();
  counters_.control_bytes = mesh_->control_bytes();
  return busy;
}

bool Engine::apply(ProcessSet& set, Negotiator::Decision& decision) {
  set.last_event = last_event_ = steady_now();
  std::vector<OperationPtr> operations;
  const auto take = [&](const std::string& name) {
    const auto unknown = decision.unknown.find(name);
    if (unknown != decision.unknown.end()) {
      operations.push_back(make_absent(name, unknown->second, set.members));
      operations.back()->submitted_at = last_event_;
      if (unknown->second.device >= 0) operations.back()->gpu.device = device(-1);
      return;
    }
    const auto found = set.pending.find(name);
    operations.push_back(std::move(found->second));
    set.pending.erase(found);
  };
  for (const std::string& name : decision.names) take(name);
  const auto run = [&] {
    if (set.executor.idle()) set.last_progress = last_event_;
    Batch batch{decision.batch, decision.plan, decision.tuning, std::move(operations),
                std::move(decision.absent)};
    // Decisions of the set of all ranks come in one order, in which other sets are made.
    if (batch.on_gpu() && last_set_ > 0) batch.turns = &gpu_turns_;
    tracing_.decided(set, batch);
    set.executor.enqueue(std::move(batch));
  };
  switch (decision.kind) {
    case DecisionItem::Kind::kBatch:
      if (is_administrative(operations.front()->signature.op)) {
        administer(set, operations.front());
      } else {
        run();
      }
      break;
    case DecisionItem::Kind::kJoined:
      // As a batch of its own, so that it ends after all that was decided before.
      take(op_kind_name(OpKind::kJoin));
      operations.front()->value = decision.rank;
      run();
      break;
    case DecisionItem::Kind::kError:
      end_operations(std::move(operations), decision.status);
      break;
    case DecisionItem::Kind::kFailAll: {
      {
        // Ranks may have counted differently; from here on they count alike again.
        std::lock_guard lock(mutex_);
        std::erase_if(unnamed_,
                      [&](const auto& entry) { return entry.first.first == set.members->set; });
      }
      end_operations(take_pending(set), decision.status);
      break;
    }
    case DecisionItem::Kind::kUninstallPlan:
      ++counters_.broken_plans;
      if (auto withdrawn = set.executor.end_plan(decision.plan, decision.batch)) {
        tracing_.ended(*withdrawn);
        for (const OperationPtr& operation : withdrawn->operations) {
          operation->outcomes.clear();
          set.pending.emplace(operation->name, operation);
        }
      }
      break;
    case DecisionItem::Kind::kDependencyQuery:
    case DecisionItem::Kind::kInstallPlan:
      break;  // the negotiator's own affair
    case DecisionItem::Kind::kClose:
      close_for_submissions(set.members->set, decision.status);
      end_operations(take_pending(set), decision.status);
      break;
  }
  return true;
}

bool Engine::execute() {
  bool busy = false;
  for (auto& [id, set] : sets_) {
    while (true) {
      if (set->executor.next_is_on_gpu() && !may_turn_to_gpu(id)) break;
      std::optional<Batch> done;
      try {
        done = set->executor.poll();
      } catch (const PeerError& error) {
        const std::string who = "rank " + std::to_string(error.rank());
        // A peer that has said goodbye is not dead; what it left unfinished ends like everything
        // after it.
        if (departed_[static_cast<std::size_t>(error.rank())]) {
          throw Error(HP_SHUT_DOWN, who + " has shut down while this was running");
        }
        throw Error(error.code(), who + ": " + error.what());
      }
      if (set->executor.take_progress()) {
        set->last_progress = quiet_since_ = steady_now();
        busy = true;
      }
      if (!done) break;
      set->last_event = last_event_ = steady_now();
      set->negotiator.batch_done(done->plan, last_event_);
      ++counters_.batches;
      if (done->plan != 0) ++counters_.planned_batches;
      for (const OperationPtr& operation : done->operations) {
        counters_.tensors += operation->signature.shapes.size();
        counters_.bytes += static_cast<std::uint64_t>(payload_bytes(operation->signature));
      }
      tracing_.ended(*done);
      end_operations(std::move(done->operations), {});
    }
  }
  return busy;
}

void Engine::check_links() {
  for (int peer = 0; peer < mesh_->size(); ++peer) {
    if (departed_[static_cast<std::size_t>(peer)]) continue;
    const Link* link = mesh_->failed(peer);
    // Looking for it may have brought this peer's goodbye.
    if (link == nullptr || departed_[static_cast<std::size_t>(peer)]) continue;
    departed_[static_cast<std::size_t>(peer)] = true;
    if (said_bye_) continue;
    const std::string what = link->closed_by_peer() ? " has died or lost its connection: " : ": ";
    throw Error(HP_ABORTED, "rank " + std::to_string(peer) + what + *link->failure());
  }
}

}  // namespace horoplug
