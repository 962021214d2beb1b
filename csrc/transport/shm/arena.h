// Where the ranks of one host meet in memory: each rank's flags and its two slots of data, readable
// by all.
//
// Collectives run in cycles, numbered from 1 through the life of the process set and the same on
// every rank. In cycle c a rank uses slot c mod 2 of its arena, and says how far it is by three
// counters that only it writes:
//     packed  >= c   its input of cycle c lies in its slot
//     reduced >= c   its part of the result lies in its slot
//     done    >= c   it reads nothing of cycle c any more
// A slot may be written again, in cycle c, when every rank is done with cycle c - 2. A rank waits
// for that (writable) before it says anything in cycle c, even if it has nothing to write.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/task.h"
#include "transport/doorbell.h"
#include "transport/shm/segment.h"

namespace horoplug {

enum class Stage : int { kPacked = 0, kReduced, kDone };

class Arena {
 public:
  // Bytes of one slot: small enough that the slots of a few ranks stay in the last-level cache
  // while a cycle is packed, reduced and unpacked; large enough to pay for the cycle's
  // synchronisation.
  static constexpr std::size_t kSlotBytes = 1 << 20;
  static constexpr std::size_t kSlots = 2;

  // The layout of one rank's segment.
  struct alignas(64) Line {
    std::atomic<std::uint64_t> value{0};
  };
  struct Header {
    alignas(64) Doorbell::Word asleep{0};
    Line stages[3];
    Line checks[kSlots];  // by cycle mod 2: hash of the batch that the cycle belongs to
  };
  static constexpr std::size_t kHeaderBytes = 4096;
  static constexpr std::size_t kSegmentBytes = kHeaderBytes + kSlots * kSlotBytes;
  static_assert(sizeof(Header) <= kHeaderBytes);

  explicit Arena(Segment segment) : segment_(std::move(segment)) {}

  Header& header() const { return *reinterpret_cast<Header*>(segment_.data()); }
  std::byte* slot(std::uint64_t cycle) const {
    return segment_.data() + kHeaderBytes + (cycle % kSlots) * kSlotBytes;
  }
  std::atomic<std::uint64_t>& stage(Stage stage) const {
    return header().stages[static_cast<int>(stage)].value;
  }

 private:
  Segment segment_;
};

// The arenas of a process set whose ranks are all on one host, and their doorbells.
class SharedGroup {
 public:
  // `global` are the members' ranks, for error messages.
  SharedGroup(int me, std::vector<Arena> arenas, std::vector<std::shared_ptr<Doorbell>> doorbells,
              std::vector<int> global);

  int rank() const { return me_; }
  int size() const { return static_cast<int>(arenas_.size()); }

  // Opens the next cycle and returns its number.
  std::uint64_t next_cycle() { return ++cycle_; }

  // A batch that this rank has begun with the cycle after `cycle` does not take place. Before any
  // cycle that comes, every rank must call skip(), also those that had not begun the batch.
  std::uint64_t cycle() const { return cycle_; }
  void rewind(std::uint64_t cycle) { cycle_ = cycle; }
  // Leaves out the cycles that a rank can have begun without the others.
  void skip();

  std::byte* slot(int rank, std::uint64_t cycle) const {
    return arenas_[static_cast<std::size_t>(rank)].slot(cycle);
  }

  // Says that this rank has come to a stage of a cycle, and wakes whoever sleeps.
  void arrive(Stage stage, std::uint64_t cycle);

  // Sets the hash of the batch that the next cycles belong to; peers see it with each
  // arrive(kPacked).
  void begin(std::uint64_t check) { check_ = check; }

  // Waits until every rank (or one of them) has come to a stage of a cycle. Waiting for kPacked
  // also compares the batches' hashes and throws Error(HP_INTERNAL) if they differ.
  class Reached final : public Waitable {
   public:
    static constexpr int kAll = -1;
    Reached(const SharedGroup& group, Stage stage, std::uint64_t cycle, int rank = kAll)
        : group_(group), stage_(stage), cycle_(cycle), only_(rank) {}
    bool ready() override;
    void finish() override;
    void blame(std::vector<int>& ranks) const override;

   private:
    bool waits_for(int rank) const;
    const SharedGroup& group_;
    const Stage stage_;
    const std::uint64_t cycle_;
    const int only_;
    int next_ = 0;  // ranks below it have arrived
  };
  Reached reached(Stage stage, std::uint64_t cycle) const { return {*this, stage, cycle}; }
  Reached reached_by(int rank, Stage stage, std::uint64_t cycle) const {
    return {*this, stage, cycle, rank};
  }
  // Whether nobody reads or writes the slots any more.
  bool quiet() const { return reached(Stage::kDone, cycle_).ready(); }
  // The slot of a cycle may be written.
  Reached writable(std::uint64_t cycle) const {
    return reached(Stage::kDone, cycle < Arena::kSlots ? 0 : cycle - Arena::kSlots);
  }

 private:
  const int me_;
  std::vector<Arena> arenas_;
  std::vector<std::shared_ptr<Doorbell>> doorbells_;
  std::vector<int> global_;
  std::uint64_t cycle_ = 0;
  std::uint64_t check_ = 0;
};

}  // namespace horoplug
