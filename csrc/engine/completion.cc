// How operations, process sets and the engine itself come to an end: done, failed, called off, or
// because somebody leaves.
#include "collectives/gpu/gpu_group.h"
#include "controller/messages.h"
#include "engine/engine.h"

namespace horoplug {
namespace {

// Peers answer a goodbye at once, unless they are stopped or gone.
constexpr double kGoodbyeSeconds = 2.0;
// How long an engine that has failed tries to tell the others.
constexpr double kLastWordsSeconds = 0.5;

}  // namespace

std::vector<OperationPtr> Engine::take_pending(ProcessSet& set) {
  std::vector<OperationPtr> operations;
  for (auto& [name, operation] : set.pending) operations.push_back(std::move(operation));
  set.pending.clear();
  return operations;
}

void Engine::end_operations(std::vector<OperationPtr> operations, const Status& status) {
  if (operations.empty()) return;
  tracing_.ended(operations, status);
  {
    std::lock_guard lock(mutex_);
    for (const OperationPtr& operation : operations) {
      if (operation->absent) continue;
      in_flight_.erase(operation->key());
      if (operation->signature.op != OpKind::kJoin) continue;
      const std::uint32_t number = operation->members->set;
      const auto known = known_sets_.find(number);
      if (known != known_sets_.end()) known->second.joined = false;
      // Ranks that joined early have counted less.
      std::erase_if(unnamed_, [&](const auto& entry) { return entry.first.first == number; });
    }
  }
  if (!status.ok()) {
    for (const OperationPtr& operation : operations) {
      const bool named = status.message.find(operation->name) != std::string::npos;
      operation->status = {status.code, named
                                            ? status.message
                                            : operation->describe() + " failed: " + status.message};
    }
  }
  handles_.finish_all(operations);
}

void Engine::close_for_submissions(std::uint32_t set, const Status& status) {
  std::lock_guard lock(mutex_);
  if (set == 0) {
    if (end_status_.ok()) end_status_ = status;
    return;
  }
  const auto known = known_sets_.find(set);
  if (known != known_sets_.end()) known->second.end = status;
}

void Engine::fail(const Status& status) {
  counters_.failed = 1;
  log_(status.code == HP_SHUT_DOWN ? LogLevel::kInfo : LogLevel::kError, status.message);
  {
    std::lock_guard lock(mutex_);
    // A failure overrules a shutdown of this rank's own that was under way.
    if (end_status_.ok() || (leave_requested_ && status.code != HP_SHUT_DOWN)) end_status_ = status;
  }
  // The others come first: when this rank's own operations have ended, its program may be gone in
  // no time, and its peers would blame this rank.
  mesh_->send_control_to_all(encode(Abort{status.code, status.message}));
  mesh_->close_writes();
  abort_gpus();
  end_everything();
  const auto all_said = [this] {
    for (int peer = 0; peer < mesh_->size(); ++peer) {
      const Link* link = mesh_->link(peer);
      if (link != nullptr && link->wants_write()) return false;
    }
    return true;
  };
  // Who does not listen is not waited for.
  const double until = steady_now() + kLastWordsSeconds;
  while (!all_said() && steady_now() < until) {
    if (!mesh_->pump_writes()) mesh_->sleep(0.01, [] { return false; });
  }
  stop();
}

void Engine::end_everything() {
  std::vector<OperationPtr> operations;
  for (auto& [id, set] : sets_) {
    for (Batch& batch : set->executor.take_all()) {
      tracing_.ended(batch);
      operations.insert(operations.end(), batch.operations.begin(), batch.operations.end());
    }
    auto pending = take_pending(*set);
    operations.insert(operations.end(), pending.begin(), pending.end());
    if (set->removal) operations.push_back(std::exchange(set->removal, nullptr));
  }
  Status status;
  {
    std::lock_guard lock(mutex_);
    operations.insert(operations.end(), submissions_.begin(), submissions_.end());
    submissions_.clear();
    status = end_status_;
  }
  end_operations(std::move(operations), status);
}

bool Engine::advance_leaving() {
  // Also a set that was decided upon when this rank had said that it leaves.
  for (auto& [id, set] : sets_) {
    if (!std::exchange(set->asked_to_leave, true)) set->negotiator.leave();
  }
  if (state_ == State::kRunning) {
    std::lock_guard lock(mutex_);
    state_ = State::kLeaving;
    leaving_since_ = steady_now();
    return true;
  }
  // Nor does the memory of tensors go while the GPU may use it.
  watch_gpus();
  if (gpu_is_busy()) return false;
  bool agreed = true;
  for (auto& [id, set] : sets_) {
    // What was decided before this rank leaves is still done; watch_transfers() sees to it that it
    // ends.
    if (!set->executor.idle()) return false;
    agreed &= set->negotiator.closed();
  }
  if (!agreed) {
    if (steady_now() - leaving_since_ < kGoodbyeSeconds) return false;
    // The others have not answered, and must not wait for this rank either.
    throw Error(HP_SHUT_DOWN, "rank " + std::to_string(config_.rank) + " has shut down");
  }
  if (!said_bye_) {
    if (!std::exchange(gpus_leave_, true)) leaving_since_ = steady_now();
    if (!gpus_are_over() && steady_now() - leaving_since_ < kGoodbyeSeconds) return false;
    said_bye_ = true;
    leaving_since_ = steady_now();
    mesh_->send_control_to_all(encode_bye());
    mesh_->close_writes();
    return true;
  }
  if (!mesh_->all_closed_by_peers() && steady_now() - leaving_since_ < kGoodbyeSeconds)
    return false;
  for (auto& [id, set] : sets_) {
    if (GpuGroup* gpu = set->executor.gpu()) gpu->close();
  }
  stop();
  return true;
}

void Engine::stop() {
  end_everything();
  mesh_->close_polled();  // who waits for the end may finalize MPI next
  if (config_.mpi) config_.mpi->close();
  tracing_.stop();
  {
    std::lock_guard lock(mutex_);
    state_ = State::kStopped;
  }
  state_changed_.notify_all();
}

}  // namespace horoplug
