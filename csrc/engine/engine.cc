#include "engine/engine.h"

#include <algorithm>
#include <span>
#include <utility>

#include "base/time.h"
#include "engine/mailboxes.h"
#include "engine/operations/submission.h"

namespace horoplug {
namespace {

// Throws Error if an engine cannot be made of this.
EngineConfig checked(EngineConfig config) {
  const int rank = config.rank;
  if (config.size() < 1 || rank < 0 || rank >= config.size()) {
    throw Error(HP_INVALID_ARGUMENT,
                "rank " + std::to_string(rank) + " of a job of " + std::to_string(config.size()));
  }
  for (int peer = 0; peer < config.size(); ++peer) {
    if (peer != rank && !config.members[peer].stream) {
      throw Error(HP_INVALID_ARGUMENT, "no connection to rank " + std::to_string(peer));
    }
  }
  if (!config.self().doorbell) config.self().doorbell = std::make_shared<Doorbell>();
  return config;
}

// The connections to each rank.
std::vector<std::vector<std::unique_ptr<Stream>>> take_lanes(EngineConfig& config) {
  ByRank<std::vector<std::unique_ptr<Stream>>> lanes(config.members.size());
  for (int peer = 0; peer < config.size(); ++peer) {
    if (peer == config.rank) continue;
    Member& member = config.members[peer];
    auto& to_peer = lanes[peer];
    to_peer.push_back(std::move(member.stream));
    for (auto& lane : member.lanes) to_peer.push_back(std::move(lane));
  }
  return lanes;
}

// How many of the first `count` ranks are on this host.
int ranks_here(const EngineConfig& config, std::size_t count) {
  const int here = config.self().host;
  return static_cast<int>(
      std::ranges::count(std::span(config.members).first(count), here, &Member::host));
}

}  // namespace

Engine::Engine(EngineConfig config, std::shared_ptr<HandleTable> handles)
    : config_(checked(std::move(config))),
      tracing_(config_.rank, config_.log),
      handle_table_(std::move(handles)),
      handles_(*handle_table_),
      doorbell_(config_.self().doorbell),
      submissions_(handles_, *doorbell_),
      tuning_log_(config_.rank == 0 ? config_.options.autotune_log : "", config_.log),
      activity_{.last_event = steady_now()},
      mesh_(take_lanes(config_), doorbell_,
            [this](int from, Bytes message) { dispatcher_.receive(from, std::move(message)); }),
      on_demand_(config_.connection_requests, mesh_, *doorbell_),
      point_to_point_(config_, mesh_, [this](Batch& batch) { scheduler_.trace_transfer(batch); }),
      segments_(config_.members.size()),
      completion_(submissions_, handles_, tracing_),
      registry_(config_, mesh_, point_to_point_, segments_, submissions_, completion_),
      buffers_(config_, segments_),
      gpu_(config_, registry_, mesh_),
      polling_(lifecycle_, registry_, point_to_point_, mesh_, activity_),
      peers_(mesh_),
      handshake_(
          config_, mesh_, *doorbell_,
          [this](std::vector<Segment> segments) { start_running(std::move(segments)); },
          clock_.now()),
      suspicion_(config_.rank, config_.size()),
      stalls_(config_, mesh_, registry_, point_to_point_, handles_, suspicion_, peers_, activity_,
              clock_),
      transfers_(config_, mesh_, registry_, point_to_point_, gpu_, suspicion_),
      plans_(config_.options, registry_, handles_, submissions_),
      wakeups_(mesh_, registry_, point_to_point_, polling_, config_.rank),
      watchdog_(config_, lifecycle_, mesh_, clock_, handshake_, transfers_, stalls_, suspicion_,
                wakeups_, plans_),
      scheduler_({.mesh = mesh_,
                  .registry = registry_,
                  .point_to_point = point_to_point_,
                  .submissions = submissions_,
                  .completion = completion_,
                  .buffers = buffers_,
                  .gpu = gpu_,
                  .peers = peers_,
                  .tracing = tracing_,
                  .tuning_log = tuning_log_,
                  .counters = counters_,
                  .activity = activity_,
                  .clock = clock_,
                  .transfers_outlive_ranks = config_.options.transfers_outlive_ranks},
                 [this](std::uint32_t set) { dispatcher_.deliver_early(set); }),
      shutdown_({.config = config_,
                 .lifecycle = lifecycle_,
                 .mesh = mesh_,
                 .peers = peers_,
                 .registry = registry_,
                 .point_to_point = point_to_point_,
                 .submissions = submissions_,
                 .completion = completion_,
                 .gpu = gpu_,
                 .transfers = transfers_,
                 .tracing = tracing_,
                 .counters = counters_}),
      dispatcher_(lifecycle_, mesh_, handshake_, registry_, point_to_point_, stalls_, suspicion_,
                  peers_, tracing_),
      loop_(*this, mesh_, *doorbell_,
            has_fewer_processors_than(ranks_here(config_, config_.members.size()),
                                      config_.options.processor_quota),
            config_.rank, ranks_here(config_, static_cast<std::size_t>(config_.rank)),
            ranks_here(config_, config_.members.size())) {
  handshake_.begin();
  loop_.start();
  const int cpu = config_.options.progress_cpu;
  if (cpu >= 0 && !loop_.pin_to(cpu)) {
    config_.log(LogLevel::kWarning, "cannot run the progress thread on CPU " + std::to_string(cpu) +
                                        " (HOROVOD_THREAD_AFFINITY); it runs on any CPU");
  }
}

Engine::~Engine() {
  shutdown();
  loop_.join();
}

void Engine::wait_until_ready() {
  // Not the end of the submissions: a peer that has left in good order may have ended them before.
  const Status failure = lifecycle_.await_start();
  if (!failure.ok()) throw Error(failure.code, failure.message);
}

void Engine::shutdown() {
  submissions_.request_leave(has_shut_down(config_.options));
  lifecycle_.await_stop();
}

void Engine::abort(const std::string& reason) { submissions_.request_abort(reason); }

// ---- operations: called by any thread ----

MembersPtr Engine::any_members(std::uint32_t set) const {
  if (MembersPtr members = registry_.members(set)) return members;
  if (const Status end = submissions_.end(); !end.ok()) throw Error(end.code, end.message);
  throw Error(HP_INVALID_ARGUMENT, "process set " + std::to_string(set) + " does not exist");
}

MembersPtr Engine::members(std::uint32_t set) const {
  MembersPtr members = any_members(set);
  if (members->index < 0) {
    throw Error(HP_INVALID_ARGUMENT, "rank " + std::to_string(config_.rank) +
                                         " is not in process set " + std::to_string(set) + " of " +
                                         describe_ranks(members->ranks));
  }
  return members;
}

// Does what needs no lock before operations are admitted.
void Engine::prepare(std::span<const OperationPtr> operations) {
  gpu_.mark_ready(operations);
  for (const OperationPtr& operation : operations) operation->buffer = buffers_.find(*operation);
}

hp_handle Engine::submit(OperationPtr operation) {
  prepare({&operation, 1});
  const Status refused = submissions_.submit({&operation, 1});
  if (!refused.ok()) throw Error(refused.code, refused.message);
  return operation->handle;
}

Status Engine::submit_all(const std::vector<OperationPtr>& operations) {
  prepare(operations);
  return submissions_.submit(operations);
}

hp_handle Engine::add_set(const std::vector<int>& ranks) {
  ProcessSetRegistry::check_ranks(ranks, size());
  return submit(
      make_administrative(OpKind::kAddSet, members(0), Shape(ranks.begin(), ranks.end())));
}

hp_handle Engine::remove_set(std::uint32_t set) {
  if (set == 0) throw Error(HP_INVALID_ARGUMENT, "the set of all ranks cannot be removed");
  if (!registry_.members(set)) {
    throw Error(HP_INVALID_ARGUMENT, "process set " + std::to_string(set) + " does not exist");
  }
  return submit(make_administrative(OpKind::kRemoveSet, members(0), {set}));
}

hp_handle Engine::join(std::uint32_t set) {
  return submit(make_administrative(OpKind::kJoin, members(set), {}));
}

hp_handle Engine::create_buffer(std::uint64_t bytes) {
  SharedBuffers::check_size(bytes);
  return submit(
      make_administrative(OpKind::kAddBuffer, members(0), {static_cast<std::int64_t>(bytes)}));
}

Status Engine::poll(hp_handle handle) {
  const Status status = handles_.poll(handle);
  if (status.code == HP_IN_PROGRESS) submissions_.announce();
  return status;
}

// No thread waits for the operation, so it must not stay in the queue until others have come.
void Engine::on_done(hp_handle handle, hp_done done, void* context) {
  if (handles_.on_done(handle, done, context)) submissions_.announce();
}

Status Engine::wait(hp_handle handle, Seconds timeout) {
  HandleTable::Wait wait(handles_, handle, timeout);
  if (wait.done()) return wait.status();
  if (timeout > Seconds::zero() && loop_.acquire()) {
    loop_.run_until_done(wait, timeout);
  } else {
    submissions_.announce();
    wait.sleep(timeout);
  }
  return wait.status();
}

Status Engine::perform(const OperationPtr& operation, Seconds timeout) {
  if (!loop_.acquire()) {
    submit(operation);
    const Status status = wait(operation->handle, timeout);
    handles_.release(operation->handle);
    return status;
  }
  HandleTable::Wait wait(handles_, timeout);
  try {
    prepare({&operation, 1});
    submissions_.submit_and_run(operation, wait);
  } catch (...) {
    loop_.release();
    throw;
  }
  loop_.run_until_done(wait, timeout);
  return wait.status();
}

void Engine::add_connection(int rank, std::vector<std::unique_ptr<Stream>> lanes) {
  check_peer(rank);
  on_demand_.add(rank, std::move(lanes));
}

void Engine::fail_connection(int rank, const std::string& reason) {
  check_peer(rank);
  on_demand_.fail(rank, reason);
}

void Engine::attach(Engine& group, const std::string& name, std::vector<int> ranks) {
  const bool is_inside =
      std::all_of(ranks.begin(), ranks.end(), [&](int rank) { return rank >= 0 && rank < size(); });
  if (&group == this || name.empty() || !is_inside ||
      ranks.size() != static_cast<std::size_t>(group.size())) {
    throw Error(HP_INVALID_ARGUMENT, "these are not the ranks of group '" + name + "'");
  }
  const auto attached =
      std::make_shared<AttachedGroup>(name, std::move(ranks), group.handle_table_, doorbell_);
  stalls_.attach(attached);
  group.stalls_.join_search(attached);
}

void Engine::check_peer(int rank) const {
  if (rank >= 0 && rank < size() && rank != config_.rank) return;
  throw Error(HP_INVALID_ARGUMENT, "rank " + std::to_string(rank) + " is no peer of rank " +
                                       std::to_string(config_.rank));
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
  stats.wakeups = loop_.wakeups();
  stats.planned_batches = counters_.planned_batches;
  stats.broken_plans = counters_.broken_plans;
  stats.failed = counters_.failed;
  stats.active_microseconds = static_cast<std::uint64_t>(submissions_.active_time().count() * 1e6);
  return stats;
}

// ---- the thread that runs the loop ----

// The handshake is over.
void Engine::start_running(std::vector<Segment> segments) {
  use_mailboxes(config_, segments_, mesh_);
  registry_.create_global(std::move(segments));
  submissions_.wake();
  lifecycle_.enter(Lifecycle::State::kRunning);
  dispatcher_.deliver_early();
}

// Whether this rank does anything for which a peer would send it control messages. Ranks that
// follow a plan exchange none, until it ends.
bool Engine::expects_messages() const {
  if (lifecycle_.starting() || lifecycle_.leave_requested() || stalls_.running()) return true;
  if (!point_to_point_.idle() || !point_to_point_.waiting().empty()) return true;
  const auto negotiates = [](const ProcessSet& set) {
    return set.busy() && !set.negotiator().follows_plan();
  };
  return std::ranges::any_of(registry_.sets(), negotiates);
}

bool Engine::step() {
  bool busy = mesh_.pump(expects_messages());
  peers_.check_links();
  // Operations would fail with the end of a link, instead of the reason for it.
  if (peers_.undecided()) return busy;
  busy |= take_requests();
  busy |= scheduler_.negotiate();
  stalls_.run();
  counters_.control_messages = mesh_.control_messages();
  counters_.control_bytes = mesh_.control_bytes();
  busy |= scheduler_.update_submissions_wanted();
  busy |= scheduler_.execute();
  busy |= scheduler_.transfer();
  busy |= registry_.finish_removals(clock_);
  busy |= on_demand_.run();
  busy |= mesh_.pump_writes();
  if (lifecycle_.leave_requested()) busy |= shutdown_.advance(clock_.now());
  if (mesh_.take_polled_traffic()) activity_.quiet_since = steady_now();
  return busy;
}

bool Engine::take_requests() {
  if (submissions_.holds_any()) scheduler_.apply_failures();
  if (!submissions_.take(lifecycle_.starting(), requests_)) return false;
  if (requests_.leave) lifecycle_.request_leave();
  for (const OperationPtr& operation : requests_.operations) scheduler_.accept(operation);
  requests_.operations.clear();
  if (requests_.abort_reason) {
    throw Error(HP_ABORTED, "rank " + std::to_string(config_.rank) +
                                " has aborted the job: " + *requests_.abort_reason);
  }
  return true;
}

bool Engine::has_running_batch() const {
  const auto runs = [](const ProcessSet& set) { return set.executor().running() != nullptr; };
  return !point_to_point_.idle() || std::ranges::any_of(registry_.sets(), runs);
}

Seconds Engine::sleep_time() {
  bool waiting = lifecycle_.starting() || lifecycle_.leave_requested() || stalls_.running() ||
                 peers_.undecided() || std::ranges::any_of(registry_.sets(), &ProcessSet::busy);
  waiting |= gpu_.is_busy() || !point_to_point_.idle() || !point_to_point_.waiting().empty();
  const bool polls = polling_.needed();
  // Peers report every other failure.
  if (!waiting && !polls) {
    clock_.expect_a_long_gap();
    return kForever;
  }
  const SteadyTime now = steady_now();
  Seconds time = watchdog_.interval();
  if (polls) time = std::min(time, polling_.interval(now));
  for (const ProcessSet& set : registry_.sets()) {
    time = std::min(time, plans_.patience(set, now));
  }
  return time;
}

}  // namespace horoplug
