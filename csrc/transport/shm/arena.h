// Where the ranks of one host meet in memory: each rank's flags, lines and slots of data, readable
// by all.
//
// Large data goes through slots, in cycles, numbered from 1 through the life of the process set and
// the same on every rank. In cycle c a rank uses slot c mod kSlots of its arena, and says how far
// it is by three counters that only it writes:
//     packed  >= c   its input of cycle c lies in its slot
//     reduced >= c   its part of the result lies in its slot
//     done    >= c   it reads nothing of cycle c any more
// A rank whose input lies where all can read it may say packed without having written its slot; if
// others' does not, it fills its slot after all, and all ranks meet at a fourth counter, repacked.
// A slot may be written again, in cycle c, when every rank is done with cycle c - kSlots. A rank
// waits for that (writable) before it says anything in cycle c, even if it has nothing to write.
//
// Small data goes through lines, in meetings, which are numbered by themselves. In meeting m a rank
// writes to its line m mod 2 and waits for all lines of m. Nothing else has to be said: who has
// written for m has read all there was to read of m - 1, and so nobody reads m - 2 any more.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/task.h"
#include "transport/doorbell.h"
#include "transport/shm/segment.h"

namespace horoplug {

enum class Stage : int { kPacked = 0, kRepacked, kReduced, kDone };

class Arena {
 public:
  // Bytes of one slot: small enough that what a rank reads and writes in a cycle stays in its own
  // cache; large enough to pay for the cycle's synchronisation.
  static constexpr std::size_t kSlotBytes = 256 << 10;
  static constexpr std::size_t kSlots = 3;
  // Bytes that fit into a line, which is many cache lines: small data lies beside its flag.
  static constexpr std::size_t kLineBytes = 4 << 10;
  static constexpr std::size_t kLines = 2;

  using Counter = std::atomic<std::uint64_t>;
  // A counter, and with kPacked what belongs to it, by cycle mod kSlots: the hash of the batch, and
  // where the input lies if not in the slot (see Call::place).
  struct alignas(64) Flag {
    Counter counter{0};
    Counter checks[kSlots];
    Counter places[kSlots];
  };
  static_assert(sizeof(Flag) == 64);
  struct alignas(64) Line {
    Counter meeting{0};
    Counter check{0};
    std::byte data[kLineBytes];
  };
  struct Header {
    alignas(64) Doorbell::Word asleep{0};
    Flag stages[4];
    Line lines[kLines];
  };
  static constexpr std::size_t kPage = 4096;
  // With a page for what is not said here, but by the ranks' GPUs.
  static constexpr std::size_t kGpusAt = (sizeof(Header) + kPage - 1) / kPage * kPage;
  static constexpr std::size_t kHeaderBytes = kGpusAt + kPage;
  static constexpr std::size_t kSegmentBytes = kHeaderBytes + kSlots * kSlotBytes;

  explicit Arena(Segment segment) : segment_(std::move(segment)) {}

  Header& header() const { return *reinterpret_cast<Header*>(segment_.data()); }
  Flag& flag(Stage stage) const { return header().stages[static_cast<int>(stage)]; }
  Line& line(std::uint64_t meeting) const { return header().lines[meeting % kLines]; }
  std::byte* gpus_page() const { return segment_.data() + kGpusAt; }
  std::byte* slot(std::uint64_t cycle) const {
    return segment_.data() + kHeaderBytes + (cycle % kSlots) * kSlotBytes;
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

  // Sets the hash of the batch that the next cycles and meetings belong to; peers see it with each
  // first stage and each line.
  void begin(std::uint64_t check) {
    check_ = check;
    begun_cycle_ = cycle_;
    begun_meeting_ = meeting_;
  }
  // The batch that was begun last does not take place, since not every rank has met the others in
  // it. Before anything else every rank, also those that had not begun it, must call skip().
  void withdraw() {
    cycle_ = begun_cycle_;
    meeting_ = begun_meeting_;
  }
  // Leaves out the cycles and meetings that a rank can have begun without the others.
  void skip();

  // ---- cycles ----

  // Opens the next cycle and returns its number.
  std::uint64_t next_cycle() { return ++cycle_; }
  std::byte* slot(int rank, std::uint64_t cycle) const { return arena(rank).slot(cycle); }

  // Says that this rank has come to a stage of a cycle, and wakes whoever sleeps.
  void arrive(Stage stage, std::uint64_t cycle) {
    publish(stage, cycle);
    ring();
  }
  // The same, but nobody is woken before this rank calls ring() or waits for this group: whoever
  // spins is there by then, and waking others costs a store that all cores must have seen.
  void publish(Stage stage, std::uint64_t cycle, std::uint64_t place = 0);
  void ring();

  // Waits until every rank (or one of them) has come to a stage of a cycle. Waiting for kPacked
  // also compares the batches' hashes and throws Error(HP_INTERNAL) if they differ.
  class Reached final : public Waitable {
   public:
    static constexpr int kAll = -1;
    Reached(SharedGroup& group, Stage stage, std::uint64_t cycle, int rank = kAll)
        : group_(group), stage_(stage), cycle_(cycle), only_(rank) {}
    bool ready() override;
    void finish() override;
    void blame(std::vector<int>& ranks) const override;

   private:
    bool waits_for(int rank) const {
      return group_.arena(rank).flag(stage_).counter.load(std::memory_order_acquire) < cycle_;
    }
    SharedGroup& group_;
    const Stage stage_;
    const std::uint64_t cycle_;
    const int only_;
    int next_ = 0;  // ranks below it have arrived
  };
  Reached reached(Stage stage, std::uint64_t cycle) { return {*this, stage, cycle}; }
  Reached reached_by(int rank, Stage stage, std::uint64_t cycle) {
    return {*this, stage, cycle, rank};
  }
  // What ranks have said with kPacked about where their input is, all of them having said so.
  enum class Inputs { kInSlots, kInOnePlace, kMixed };
  Inputs inputs(std::uint64_t cycle) const;
  // Whether nobody reads or writes the slots any more.
  bool quiet() { return reached(Stage::kDone, cycle_).ready(); }
  // The slot of a cycle may be written.
  Reached writable(std::uint64_t cycle) {
    return reached(Stage::kDone, cycle < Arena::kSlots ? 0 : cycle - Arena::kSlots);
  }

  // ---- meetings ----

  // Opens the next meeting and returns its number.
  std::uint64_t next_meeting() { return ++meeting_; }
  std::byte* line(int rank, std::uint64_t meeting) const { return arena(rank).line(meeting).data; }
  // Says that this rank's line is written; like publish(), wakes nobody yet.
  void show(std::uint64_t meeting);

  // Waits until every rank has shown its line of a meeting, and compares the batches' hashes.
  class Met final : public Waitable {
   public:
    Met(SharedGroup& group, std::uint64_t meeting) : group_(group), meeting_(meeting) {}
    bool ready() override;
    void finish() override;
    void blame(std::vector<int>& ranks) const override;

   private:
    bool waits_for(int rank) const {
      return group_.arena(rank).line(meeting_).meeting.load(std::memory_order_acquire) != meeting_;
    }
    SharedGroup& group_;
    const std::uint64_t meeting_;
    int next_ = 0;
  };
  Met met(std::uint64_t meeting) { return {*this, meeting}; }

  // A page that all ranks have, of zeros at first, and that nothing here touches: their GPUs meet
  // in it (IpcPeers).
  std::byte* gpus_page() const { return arena(0).gpus_page(); }

  // Memory for one operand per rank, which the next call of any collective may use.
  std::span<const void*> operands() { return operands_; }

 private:
  const Arena& arena(int rank) const { return arenas_[static_cast<std::size_t>(rank)]; }
  void compare(int rank, std::uint64_t check) const;

  const int me_;
  std::vector<Arena> arenas_;
  std::vector<std::shared_ptr<Doorbell>> doorbells_;
  std::vector<int> global_;
  std::vector<const void*> operands_;
  std::uint64_t cycle_ = 0;
  std::uint64_t meeting_ = 0;
  std::uint64_t check_ = 0;
  std::uint64_t begun_cycle_ = 0;
  std::uint64_t begun_meeting_ = 0;
  bool unheard_ = false;  // something was published since the last ring()
};

}  // namespace horoplug
