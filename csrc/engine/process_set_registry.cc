// How process sets come, are found, and go. They are decided upon in the set of all ranks, like any
// operation, so that every rank sees the same ones in the same order and numbers them alike.
#include <algorithm>

#include "collectives/gpu/gpu_group.h"
#include "engine/engine.h"
#include "engine/submission.h"

namespace horoplug {
namespace {

// Messages for a set that this rank has yet to hear of. A peer can be ahead by what it says before
// it waits for this rank.
constexpr std::size_t kMaxEarly = 1 << 16;

void check_ranks(const std::vector<int>& ranks, int size) {
  const auto reject = [](const std::string& text) { throw Error(HP_INVALID_ARGUMENT, text); };
  if (ranks.empty()) reject("a process set without ranks");
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i] < 0 || ranks[i] >= size) {
      reject("rank " + std::to_string(ranks[i]) + " does not exist; there are ranks 0 to " +
             std::to_string(size - 1));
    }
    if (i > 0 && ranks[i] <= ranks[i - 1]) {
      reject("the ranks of a process set must be ascending, without repetition");
    }
  }
}

// The same tree with global ranks.
TreePosition globally(TreePosition place, const Members& members) {
  const auto global = [&](int& index) { index = members.ranks[static_cast<std::size_t>(index)]; };
  global(place.rank);
  if (place.parent >= 0) global(place.parent);
  std::for_each(place.children.begin(), place.children.end(), global);
  for (auto& below : place.subtrees) std::for_each(below.begin(), below.end(), global);
  return place;
}

}  // namespace

// ---- called by any thread ----

MembersPtr Engine::any_members(std::uint32_t set) const {
  std::lock_guard lock(mutex_);
  const auto found = known_sets_.find(set);
  if (found == known_sets_.end()) {
    if (!end_status_.ok()) throw Error(end_status_.code, end_status_.message);
    throw Error(HP_INVALID_ARGUMENT, "process set " + std::to_string(set) + " does not exist");
  }
  return found->second.members;
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

hp_handle Engine::add_set(const std::vector<int>& ranks) {
  check_ranks(ranks, size());
  return submit(
      make_administrative(OpKind::kAddSet, members(0), Shape(ranks.begin(), ranks.end())));
}

hp_handle Engine::remove_set(std::uint32_t set) {
  if (set == 0) throw Error(HP_INVALID_ARGUMENT, "the set of all ranks cannot be removed");
  {
    std::lock_guard lock(mutex_);
    if (!known_sets_.contains(set)) {
      throw Error(HP_INVALID_ARGUMENT, "process set " + std::to_string(set) + " does not exist");
    }
  }
  return submit(make_administrative(OpKind::kRemoveSet, members(0), {set}));
}

hp_handle Engine::join(std::uint32_t set) {
  return submit(make_administrative(OpKind::kJoin, members(set), {}));
}

// ---- the progress thread ----

// `segments`: the memory of those members that are on this rank's host, or none.
void Engine::make_set(const MembersPtr& members, std::vector<Segment> segments) {
  const int here = config_.members[static_cast<std::size_t>(config_.rank)].host;
  std::vector<int> hosts;
  std::vector<int> local;
  std::vector<std::vector<Link*>> links;
  int most_lanes = 1;
  std::vector<std::shared_ptr<Doorbell>> doorbells;
  for (const int rank : members->ranks) {
    const Member& member = config_.members[static_cast<std::size_t>(rank)];
    hosts.push_back(member.host);
    links.push_back(mesh_->data_lanes(rank));
    most_lanes = std::max(most_lanes, static_cast<int>(links.back().size()));
    if (member.host != here) continue;
    local.push_back(rank);
    doorbells.push_back(member.doorbell);
  }
  const HostGrid grid(hosts);
  std::unique_ptr<SharedGroup> shared;
  if (segments.size() == local.size() && grid.per_host() > 1) {
    std::vector<Arena> arenas(segments.begin(), segments.end());
    shared = std::make_unique<SharedGroup>(grid.local_rank(members->index), std::move(arenas),
                                           std::move(doorbells), std::move(local));
  }
  auto comm =
      std::make_unique<Comm>(members->index, std::move(links),
                             grid.hosts() == 1 ? shared.get() : nullptr, config_.options.costs);
  if (shared && grid.hosts() > 1) {
    comm->set_local(shared.get(), grid.host_ranks(members->index),
                    grid.cross_ranks(members->index));
  }
  // Not of another set of all ranks: theirs would run side by side, and meet each other's.
  if (members->set == 0) comm->set_mpi(config_.mpi.get());
  Negotiator::Options options;
  options.fusion_threshold = config_.options.fusion_threshold;
  options.fuse_groups = config_.options.fuse_groups;
  options.cache_capacity = config_.options.cache_capacity;
  options.plan_after = config_.options.plan_after;
  options.tuning = config_.options.tuning;
  options.tuner = config_.options.tuner;
  options.job = {.ranks = members->size(), .one_host = grid.hosts() == 1, .lanes = most_lanes};
  const std::string& algorithm = config_.options.algorithm;
  const std::string& on_gpus = config_.options.gpu_algorithm;
  Executor::Forced forced{algorithm, on_gpus.empty() ? algorithm : on_gpus};
  TreePosition place = globally(Topology(hosts).position(members->index), *members);
  sets_.emplace(members->set,
                std::make_unique<ProcessSet>(members, std::move(shared), std::move(place), options,
                                             std::move(comm), std::move(forced)));
}

void Engine::create_set(std::vector<int> ranks) {
  const std::uint32_t number = ++last_set_;
  const MembersPtr members = make_members(number, std::move(ranks), config_.rank);
  {
    std::lock_guard lock(mutex_);
    known_sets_.emplace(number, KnownSet{members, false, {}});
  }
  // Where a set has its memory in its ranks' segments. All ranks count alike, and places are not
  // used again: some rank may not be done yet with what was there.
  const int here = config_.members[static_cast<std::size_t>(config_.rank)].host;
  std::vector<int> hosts;
  for (const int rank : members->ranks) {
    hosts.push_back(config_.members[static_cast<std::size_t>(rank)].host);
  }
  const bool together = HostGrid(hosts).per_host() > 1;
  std::vector<Segment> segments;
  std::size_t own_place = 0;
  for (const int rank : members->ranks) {
    if (!together) break;
    const std::size_t place = reserve(rank, Arena::kSegmentBytes);
    const Member& member = config_.members[static_cast<std::size_t>(rank)];
    const Fd& file = member.segment_file;
    if (rank == config_.rank) own_place = place;
    if (members->index < 0 || !file || member.host != here) continue;
    Segment::extend(file, place + Arena::kSegmentBytes);
    segments.push_back(Segment::map(file, Arena::kSegmentBytes, place));
  }
  auto early = std::exchange(early_set_messages_[number], {});
  early_set_messages_.erase(number);
  if (members->index < 0) return;
  make_set(members, std::move(segments));
  sets_.at(number)->memory_at = own_place;
  sets_.at(number)->last_progress = steady_now();
  for (auto& [from, message] : early) dispatch_safely(from, message);
}

void Engine::administer(ProcessSet& set, const OperationPtr& operation) {
  set.negotiator.batch_done(0);
  const Shape& arguments = operation->signature.shapes.front();
  if (operation->signature.op == OpKind::kAddSet) {
    create_set(std::vector<int>(arguments.begin(), arguments.end()));
    operation->value = last_set_;
    end_operations({operation}, {});
    return;
  }
  if (operation->signature.op == OpKind::kAddBuffer) return add_buffer(operation);
  const auto number = static_cast<std::uint32_t>(arguments.front());
  {
    std::lock_guard lock(mutex_);
    known_sets_.erase(number);
  }
  const auto found = sets_.find(number);
  if (found == sets_.end()) {
    end_operations({operation}, {});
  } else if (found->second->removal) {
    end_operations({operation}, {HP_INVALID_ARGUMENT, "it is being removed already"});
  } else {
    found->second->removal = operation;
    found->second->last_progress = steady_now();
    found->second->negotiator.close();
  }
}

bool Engine::finish_removals() {
  bool busy = false;
  for (auto it = sets_.begin(); it != sets_.end();) {
    ProcessSet& set = *it->second;
    const bool over = set.removal && set.negotiator.closed() && set.executor.idle() &&
                      !set.executor.gpu_is_busy() && (!set.shared || set.shared->quiet());
    if (!over) {
      ++it;
      continue;
    }
    const OperationPtr removal = std::exchange(set.removal, nullptr);
    removed_sets_.push_back(std::move(it->second));
    it = sets_.erase(it);
    end_operations({removal}, {});
    busy = true;
  }
  busy |= forget_removed();
  return busy;
}

// What a set had on the GPU is given back when that is idle. CUDA's driver may wait for it there,
// also for what other sets do, and would not see that a rank is gone for which the GPU waits.
bool Engine::forget_removed() {
  const auto is_over = [this](const std::unique_ptr<ProcessSet>& set) {
    GpuGroup* const gpu = set->executor.gpu();
    if (gpu != nullptr && !(gpu->workspace().device().idle() && gpu->over())) return false;
    if (set->shared) {
      // Not the flags: a peer may still have to see that this rank is done.
      Segment::discard(config_.members[static_cast<std::size_t>(config_.rank)].segment_file,
                       set->memory_at + Arena::kHeaderBytes,
                       Arena::kSegmentBytes - Arena::kHeaderBytes);
    }
    return true;
  };
  return std::erase_if(removed_sets_, is_over) > 0;
}

ProcessSet* Engine::set_of_message(std::uint32_t number, int from,
                                   std::span<const std::byte> message) {
  const auto found = sets_.find(number);
  if (found != sets_.end()) {
    if (found->second->members->index_of(from) < 0) {
      throw WireError("it is not in process set " + std::to_string(number));
    }
    return found->second.get();
  }
  if (number > last_set_) {
    auto& early = early_set_messages_[number];
    if (early.size() >= kMaxEarly) throw WireError("an unknown process set");
    early.emplace_back(from, Bytes(message.begin(), message.end()));
  }
  // Otherwise the set was removed, and what its ranks still had to say has no use.
  return nullptr;
}

}  // namespace horoplug
