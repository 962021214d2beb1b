#include "engine/process_set_registry.h"

#include <algorithm>
#include <numeric>

#include "base/time.h"
#include "collectives/gpu/gpu_group.h"
#include "engine/execution/make_process_set.h"
#include "engine/operations/submission.h"

namespace horoplug {

// ---- called by any thread ----

void ProcessSetRegistry::check_ranks(const std::vector<int>& ranks, int size) {
  const auto reject = [](const std::string& text) { throw Error(HP_INVALID_ARGUMENT, text); };
  if (ranks.empty()) reject("a process set needs at least one rank");
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i] < 0 || ranks[i] >= size) {
      reject("process set of " + describe_ranks(ranks) + ": rank " + std::to_string(ranks[i]) +
             " does not exist; there are ranks 0 to " + std::to_string(size - 1));
    }
    if (i > 0 && ranks[i] <= ranks[i - 1]) {
      reject("the ranks of a process set must be ascending, without repetition");
    }
  }
}

MembersPtr ProcessSetRegistry::members(std::uint32_t set) const {
  std::lock_guard lock(mutex_);
  const auto found = known_.find(set);
  return found == known_.end() ? nullptr : found->second;
}

std::map<std::uint32_t, std::vector<int>> ProcessSetRegistry::ranks_by_set() const {
  std::map<std::uint32_t, std::vector<int>> ranks;
  std::lock_guard lock(mutex_);
  for (const auto& [number, members] : known_) ranks[number] = members->ranks;
  return ranks;
}

// ---- the thread that runs the loop ----

ProcessSet* ProcessSetRegistry::find(std::uint32_t number) const {
  const auto found = sets_.find(number);
  return found == sets_.end() ? nullptr : found->second.get();
}

std::vector<GpuGroup*> ProcessSetRegistry::gpus() const {
  std::vector<GpuGroup*> gpus;
  for (const ProcessSet& set : sets()) {
    if (GpuGroup* const gpu = set.executor().gpu()) gpus.push_back(gpu);
  }
  return gpus;
}

void ProcessSetRegistry::add_known(const MembersPtr& members) {
  submissions_.open_set(members->set);
  std::lock_guard lock(mutex_);
  known_.emplace(members->set, members);
}

void ProcessSetRegistry::create_global(std::vector<Segment> segments) {
  std::vector<int> ranks(config_.members.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  const MembersPtr members = make_members(0, std::move(ranks), config_.rank);
  sets_.emplace(0, make_process_set(config_, mesh_, members, std::move(segments)));
  add_known(members);
}

std::uint32_t ProcessSetRegistry::create(std::vector<int> ranks, RunningTime now) {
  const std::uint32_t number = ++last_number_;
  const MembersPtr members = make_members(number, std::move(ranks), config_.rank);
  add_known(members);
  // The set's shared memory is a part of each member's segment. All ranks of the job reserve it,
  // also those that are not in the set.
  const int here = config_.self().host;
  std::vector<int> hosts;
  for (const int rank : members->ranks) {
    hosts.push_back(config_.members[rank].host);
  }
  const bool shares_memory = HostGrid(hosts).most() > 1;
  std::vector<Segment> segments;
  for (const int rank : members->ranks) {
    if (!shares_memory) break;
    const auto [offset, used_before] = segments_.reserve(rank, Arena::kSegmentBytes);
    reserved_[number].emplace_back(rank, offset);
    const Member& member = config_.members[rank];
    const Fd& file = member.segment_file;
    // Peers read it only in a batch of the set, which this rank has to agree to first.
    if (rank == config_.rank && used_before && file) {
      Segment::discard(file, offset, Arena::kSegmentBytes);
    }
    if (members->index < 0 || !file || member.host != here) continue;
    Segment::extend(file, offset + Arena::kSegmentBytes);
    segments.push_back(Segment::map(file, Arena::kSegmentBytes, offset));
  }
  if (members->index < 0) return number;
  auto set = make_process_set(config_, mesh_, members, std::move(segments));
  set->note_progress(now);
  sets_.emplace(number, std::move(set));
  return number;
}

void ProcessSetRegistry::begin_removal(std::uint32_t number, const OperationPtr& removal,
                                       RunningTime now) {
  submissions_.forget_set(number);
  {
    std::lock_guard lock(mutex_);
    known_.erase(number);
  }
  ProcessSet* const set = find(number);
  if (set == nullptr) {
    completion_.end(removal, {});
    release(number, now);
  } else if (!set->remove(removal, now)) {
    completion_.end(removal, {HP_INVALID_ARGUMENT, "it is being removed already"});
  }
}

bool ProcessSetRegistry::finish_removals(RunningClock& clock) {
  bool busy = false;
  for (auto it = sets_.begin(); it != sets_.end();) {
    ProcessSet& set = *it->second;
    if (!set.removed() || point_to_point_.has_transfers(set.number())) {
      ++it;
      continue;
    }
    const OperationPtr removal = set.take_removal();
    point_to_point_.forget_set(set.number());
    removed_.push_back(std::move(it->second));
    it = sets_.erase(it);
    completion_.end(removal, {});
    busy = true;
  }
  // Before this rank can join the global set, since its program hears of the removal only now.
  if (!removed_.empty()) busy |= release_removed(clock.now());
  return busy;
}

// The GPU memory of a set is given back only when the GPU is idle. CUDA's driver may block until
// then, also for the work of other sets, and would not notice that a rank is gone for which the GPU
// waits.
bool ProcessSetRegistry::release_removed(RunningTime now) {
  const auto is_over = [this, now](const std::unique_ptr<ProcessSet>& set) {
    GpuGroup* const gpu = set->executor().gpu();
    if (gpu != nullptr && !(gpu->workspace().device().idle() && gpu->over())) return false;
    if (set->shares_memory()) discard_memory(reserved_.at(set->number()));
    release(set->number(), now);
    return true;
  };
  return std::erase_if(removed_, is_over) > 0;
}

// ---- shared memory of removed sets ----

// This rank does not need its part any more, except for the flags: a peer may still have to see
// that this rank is done.
void ProcessSetRegistry::discard_memory(const Reserved& parts) const {
  for (const auto& [rank, offset] : parts) {
    if (rank != config_.rank) continue;
    Segment::discard(config_.members[rank].segment_file, offset + Arena::kHeaderBytes,
                     Arena::kSegmentBytes - Arena::kHeaderBytes);
  }
}

void ProcessSetRegistry::release(std::uint32_t number, RunningTime now) {
  if (!reserved_.contains(number) || !releases_.emplace(number, nullptr).second) return;
  submit_release(number, now);
}

void ProcessSetRegistry::submit_release(std::uint32_t number, RunningTime now) {
  ProcessSet& all = global();
  if (all.negotiator().joined()) return;
  const OperationPtr release = make_administrative(OpKind::kReleaseSet, all.members(), {number});
  release->identity =
      make_identity("release process set " + std::to_string(number), release->signature());
  release->submitted_at = steady_now();
  if (all.accept(release, now).ok()) releases_[number] = release;
}

void ProcessSetRegistry::finish_release(std::uint32_t number) {
  releases_.erase(number);
  const auto reserved = reserved_.extract(number);
  if (reserved.empty()) return;
  for (const auto& [rank, offset] : reserved.mapped()) {
    segments_.free(rank, offset, Arena::kSegmentBytes);
  }
}

void ProcessSetRegistry::submit_releases_again(RunningTime now) {
  for (const auto& [number, release] : releases_) {
    if (!release || !release->status.ok()) submit_release(number, now);
  }
}

}  // namespace horoplug
