// The process sets of one rank: how they are created, found and removed.
//
// Every rank knows all sets; it has a ProcessSet for those that it is in. Sets are created and
// removed by operations on all ranks, so that every rank sees the same sets in the same order and
// gives them the same numbers.
//
// A set's shared memory is used again once no rank needs it. Each rank that is done with a removed
// set, or is not in it, submits a release: an operation of the global set that no program waits
// for. When it is decided, all ranks are done, and all free the memory at the same place in the
// order of decisions.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <ranges>
#include <utility>
#include <vector>

#include "engine/completion.h"
#include "engine/execution/process_set.h"
#include "engine/operations/submission_queue.h"
#include "engine/options.h"
#include "engine/point_to_point.h"
#include "engine/segment_allocator.h"
#include "transport/mesh.h"

namespace horoplug {

class ProcessSetRegistry {
 public:
  ProcessSetRegistry(const EngineConfig& config, Mesh& mesh, PointToPoint& point_to_point,
                     SegmentAllocator& segments, SubmissionQueue& submissions,
                     Completion& completion)
      : config_(config),
        mesh_(mesh),
        point_to_point_(point_to_point),
        segments_(segments),
        submissions_(submissions),
        completion_(completion) {}

  // ---- called by any thread

  // Throws Error(HP_INVALID_ARGUMENT) unless these ranks, of `size` ranks, can form a set.
  static void check_ranks(const std::vector<int>& ranks, int size);
  // The ranks of a set that exists; nullptr if it does not.
  MembersPtr members(std::uint32_t set) const;
  // All sets that exist, by number.
  std::map<std::uint32_t, std::vector<int>> ranks_by_set() const;

  // ---- the thread that runs the loop

  // The sets that this rank is in, by number; number 0 is the set of all ranks, the global set. A
  // set may be created meanwhile.
  auto sets() const {
    return sets_ | std::views::values |
           std::views::transform([](const auto& set) -> ProcessSet& { return *set; });
  }
  // The GPUs of those that have used theirs.
  std::vector<GpuGroup*> gpus() const;
  ProcessSet& global() const { return *sets_.at(0); }
  // nullptr: it does not exist, or this rank is not in it.
  ProcessSet* find(std::uint32_t number) const;
  // The number of the set that was created last; 0: there is only the global set.
  std::uint32_t last_number() const { return last_number_; }

  // `segments`: the shared memory of the ranks on this rank's host.
  void create_global(std::vector<Segment> segments);
  // Returns the number of the new set.
  std::uint32_t create(std::vector<int> ranks, RunningTime now);
  // The set exists no more for submitters. `removal` ends when nothing of it runs any more.
  void begin_removal(std::uint32_t number, const OperationPtr& removal, RunningTime now);
  // Whether a removal has come to its end. Reads the clock only if one has.
  bool finish_removals(RunningClock& clock);
  // All ranks have released the shared memory of a removed set.
  void finish_release(std::uint32_t number);
  // An administrative operation was decided, so no rank has joined: releases that a rank that had
  // joined could not take part in are submitted again, on all ranks.
  void submit_releases_again(RunningTime now);
  // Sets that were removed and still have something on the GPU.
  const std::vector<std::unique_ptr<ProcessSet>>& removed() const { return removed_; }

 private:
  // The parts of the ranks' segments that belong to a set: rank and offset.
  using Reserved = std::vector<std::pair<int, std::size_t>>;

  void add_known(const MembersPtr& members);
  bool release_removed(RunningTime now);
  void discard_memory(const Reserved& parts) const;
  void release(std::uint32_t number, RunningTime now);
  void submit_release(std::uint32_t number, RunningTime now);

  const EngineConfig& config_;
  Mesh& mesh_;
  PointToPoint& point_to_point_;
  SegmentAllocator& segments_;
  SubmissionQueue& submissions_;
  Completion& completion_;

  // Under the lock.
  mutable std::mutex mutex_;
  std::map<std::uint32_t, MembersPtr> known_;

  // Used by the thread that runs the loop.
  std::map<std::uint32_t, std::unique_ptr<ProcessSet>> sets_;
  std::vector<std::unique_ptr<ProcessSet>> removed_;
  std::uint32_t last_number_ = 0;
  std::map<std::uint32_t, Reserved> reserved_;  // by number
  // By number: operations that release the memory of removed sets; nullptr: not submitted yet.
  std::map<std::uint32_t, OperationPtr> releases_;
};

}  // namespace horoplug
