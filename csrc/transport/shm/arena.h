// The memory in which the ranks of one host communicate: each rank owns an arena with flags, flag
// lines and data slots, which all ranks can read.
//
// Large data passes through slots in cycles. Cycles are numbered from 1 for the life of the process
// set, identically on every rank. In cycle c a rank uses slot c mod kSlots of its arena, and
// publishes its progress in three counters that only it writes:
//     packed  >= c   its input of cycle c is in its slot
//     reduced >= c   its part of the result is in its slot
//     done    >= c   it no longer reads anything of cycle c
// A rank whose input is in memory that all ranks can read may publish `packed` without writing its
// slot. If another rank's input is not, the rank fills its slot after all, and all ranks
// synchronise on a fourth counter, `repacked`. A slot may be written again in cycle c once every
// rank is done with cycle c - kSlots. A rank waits for that (writable) before it publishes anything
// in cycle c, even if it has nothing to write.
//
// Small data passes through flag lines in exchanges, which have a numbering of their own. In
// exchange m a rank writes its flag line m mod 2 and waits for the flag lines of all ranks for m.
// No further counter is needed: a rank that has written for m has read everything of m - 1, so no
// rank still reads m - 2.
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
  // Bytes of one slot: small enough that the data of a cycle stays in the rank's own cache, and
  // large enough to amortise the cycle's synchronisation.
  static constexpr std::size_t kSlotBytes = 256 << 10;
  static constexpr std::size_t kSlots = 3;
  // Data bytes of a flag line, which spans many cache lines: small data lies beside its flag.
  static constexpr std::size_t kLineBytes = 4 << 10;
  static constexpr std::size_t kLines = 2;

  using Counter = std::atomic<std::uint64_t>;
  // A counter and, for kPacked, the values that belong to it, indexed by cycle mod kSlots: the hash
  // of the batch, and the position of the input if it is not in the slot (see Call::place).
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
  // The header ends with a page for the ranks' GPUs.
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

// The arenas and doorbells of the members of a process set on one host.
class SharedGroup {
 public:
  // `global`: the members' ranks in the job, for error messages.
  SharedGroup(int me, std::vector<Arena> arenas, std::vector<std::shared_ptr<Doorbell>> doorbells,
              std::vector<int> global);

  int rank() const { return me_; }
  int size() const { return static_cast<int>(arenas_.size()); }

  // Sets the hash of the batch for the next cycles and exchanges. Peers see it with each kPacked
  // flag and each flag line.
  void begin(std::uint64_t check) {
    check_ = check;
    begun_cycle_ = cycle_;
    begun_meeting_ = meeting_;
  }
  // Withdraws the batch that was begun last, because not every rank joined it. Before the next
  // batch every rank, including ranks that had not begun this one, must call skip().
  void withdraw() {
    cycle_ = begun_cycle_;
    meeting_ = begun_meeting_;
  }
  // Skips the cycles and exchanges that some ranks may have begun alone.
  void skip();

  // ---- cycles ----

  // Opens the next cycle and returns its number.
  std::uint64_t next_cycle() { return ++cycle_; }
  std::byte* slot(int rank, std::uint64_t cycle) const { return arena(rank).slot(cycle); }

  // Publishes that this rank has reached a stage of a cycle, and wakes sleeping ranks.
  void arrive(Stage stage, std::uint64_t cycle) {
    publish(stage, cycle);
    ring();
  }
  // The same without waking: sleeping ranks are woken when this rank calls ring() or waits for this
  // group. A rank that spins has seen the flag by then, and waking costs a store that all cores
  // must observe.
  void publish(Stage stage, std::uint64_t cycle, std::uint64_t place = 0);
  void ring();

  // Waits until every rank, or one given rank, has reached a stage of a cycle. Waiting for kPacked
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
    int next_ = 0;  // lower ranks have arrived
  };
  Reached reached(Stage stage, std::uint64_t cycle) { return {*this, stage, cycle}; }
  Reached reached_by(int rank, Stage stage, std::uint64_t cycle) {
    return {*this, stage, cycle, rank};
  }
  // Where the ranks' inputs of a cycle are, after all ranks have published kPacked.
  enum class Inputs { kInSlots, kInOnePlace, kMixed };
  Inputs inputs(std::uint64_t cycle) const;
  // Whether no rank reads or writes the slots any more.
  bool quiet() { return reached(Stage::kDone, cycle_).ready(); }
  // Waits until this rank may write the slot of a cycle.
  Reached writable(std::uint64_t cycle) {
    return reached(Stage::kDone, cycle < Arena::kSlots ? 0 : cycle - Arena::kSlots);
  }

  // ---- exchanges ----

  // Opens the next exchange and returns its number.
  std::uint64_t next_meeting() { return ++meeting_; }
  std::byte* line(int rank, std::uint64_t meeting) const { return arena(rank).line(meeting).data; }
  // Publishes this rank's flag line. Like publish(), it wakes no rank yet.
  void show(std::uint64_t meeting);

  // Waits until every rank has published its flag line of an exchange, and compares the batches'
  // hashes.
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

  // A page that all ranks map, initially zero. Only the ranks' GPUs use it, for synchronisation
  // (IpcPeers).
  std::byte* gpus_page() const { return arena(0).gpus_page(); }

  // Memory for one operand per rank. The next call of any collective may overwrite it.
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
