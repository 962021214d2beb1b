// How the ranks of a process set on one host move data through their arenas
// (transport/shm/arena.h), and how they synchronise.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/task.h"
#include "transport/doorbell.h"
#include "transport/shm/arena.h"

namespace horoplug {

// The arenas and doorbells of the members of a process set on one host.
class HostMemory {
 public:
  // `global`: the members' ranks in the job, for error messages.
  HostMemory(int me, std::vector<Arena> arenas, std::vector<std::shared_ptr<Doorbell>> doorbells,
             std::vector<int> global);

  int rank() const { return me_; }
  int size() const { return static_cast<int>(arenas_.size()); }

  // Sets the hash of the batch for the next cycles and exchanges. Peers see it with each kPacked
  // flag and each flag line.
  void begin(std::uint64_t check) {
    check_ = check;
    begun_cycle_ = cycle_;
    begun_exchange_ = exchange_;
  }
  // Withdraws the batch that was begun last, because not every rank joined it. Before the next
  // batch every rank, including ranks that had not begun this one, must call skip().
  void withdraw() {
    cycle_ = begun_cycle_;
    exchange_ = begun_exchange_;
  }
  // Skips the cycles and exchanges that some ranks may have begun alone.
  void skip();

  // ---- cycles: see Cycle ----

  // Wakes the ranks that sleep, if this rank has published something since it last did.
  void ring();

  // Waits until every rank, or one given rank, has reached a stage of a cycle. Waiting for kPacked
  // also compares the batches' hashes and throws Error(HP_INTERNAL) if they differ.
  class Reached final : public Waitable {
   public:
    static constexpr int kAll = -1;
    Reached(HostMemory& memory, Stage stage, std::uint64_t cycle, int rank = kAll)
        : memory_(memory), stage_(stage), cycle_(cycle), only_(rank) {}
    bool ready() override;
    void finish() override;
    void blame(std::vector<int>& ranks) const override;

   private:
    bool waits_for(int rank) const {
      return memory_.arena(rank).flag(stage_).counter.load(std::memory_order_acquire) < cycle_;
    }
    HostMemory& memory_;
    const Stage stage_;
    const std::uint64_t cycle_;
    const int only_;
    int next_ = 0;  // lower ranks have arrived
  };
  // Whether no rank reads or writes the slots any more.
  bool quiet() { return Reached(*this, Stage::kDone, cycle_).ready(); }
  // Where the ranks' inputs of a cycle are, after all ranks have published kPacked.
  enum class Inputs { kInSlots, kInOnePlace, kMixed };

  // ---- exchanges ----

  // Opens the next exchange and returns its number.
  std::uint64_t next_exchange() { return ++exchange_; }
  std::byte* line(int rank, std::uint64_t exchange) const {
    return arena(rank).line(exchange).data;
  }
  // Publishes this rank's flag line. Like publish(), it rings no doorbell yet.
  void publish_line(std::uint64_t exchange);

  // Waits until every rank has published its flag line of an exchange, and compares the batches'
  // hashes.
  class Exchanged final : public Waitable {
   public:
    Exchanged(HostMemory& memory, std::uint64_t exchange) : memory_(memory), exchange_(exchange) {}
    bool ready() override;
    void finish() override;
    void blame(std::vector<int>& ranks) const override;

   private:
    bool waits_for(int rank) const {
      return memory_.arena(rank).line(exchange_).flag.load(std::memory_order_acquire) != exchange_;
    }
    HostMemory& memory_;
    const std::uint64_t exchange_;
    int next_ = 0;
  };
  Exchanged exchanged(std::uint64_t exchange) { return {*this, exchange}; }

  // A page that all ranks map, initially zero. Only the ranks' GPUs use it, for synchronisation
  // (IpcPeers).
  std::byte* gpus_page() const { return arena(0).gpus_page(); }

  // Memory for one operand per rank. The next call of any collective may overwrite it.
  std::span<const void*> operands() { return operands_; }

 private:
  friend class Cycle;
  void publish(Stage stage, std::uint64_t cycle, std::uint64_t place);
  Inputs inputs(std::uint64_t cycle) const;

  const Arena& arena(int rank) const { return arenas_[static_cast<std::size_t>(rank)]; }
  void compare(int rank, std::uint64_t check) const;

  const int me_;
  std::vector<Arena> arenas_;
  std::vector<std::shared_ptr<Doorbell>> doorbells_;
  std::vector<int> global_;
  std::vector<const void*> operands_;
  std::uint64_t cycle_ = 0;
  std::uint64_t exchange_ = 0;
  std::uint64_t check_ = 0;
  std::uint64_t begun_cycle_ = 0;
  std::uint64_t begun_exchange_ = 0;
  bool ring_pending_ = false;  // something was published since the last ring()
};

// One use of the ranks' slots, in which all ranks of the host take part: each waits until its slot
// is writable, fills it, publishes kPacked, waits for the others and reads their slots, and
// publishes kDone. The end of a cycle is not published by a destructor: of a batch that fails or is
// withdrawn, nothing more may be published.
class Cycle {
 public:
  // Opens the next cycle.
  explicit Cycle(HostMemory& memory) : memory_(&memory), number_(++memory.cycle_) {}

  // The slot of a rank, or of this one.
  std::byte* slot(int rank) const { return memory_->arena(rank).slot(number_); }
  std::byte* slot() const { return slot(memory_->rank()); }

  // Waits until this rank may write its slot.
  HostMemory::Reached writable() const {
    const std::uint64_t before = number_ < Arena::kSlots ? 0 : number_ - Arena::kSlots;
    return {*memory_, Stage::kDone, before};
  }
  // Waits until every rank, or one given rank, has reached a stage.
  HostMemory::Reached reached(Stage stage) const { return {*memory_, stage, number_}; }
  HostMemory::Reached reached_by(int rank, Stage stage) const {
    return {*memory_, stage, number_, rank};
  }
  // Where the ranks' inputs are, after all ranks have published kPacked.
  HostMemory::Inputs inputs() const { return memory_->inputs(number_); }

  // Publishes that this rank has reached a stage, and wakes sleeping ranks.
  void arrive(Stage stage) const {
    publish(stage);
    memory_->ring();
  }
  // The same without waking: sleeping ranks are woken when this rank calls ring() or waits for
  // other ranks. A rank that spins has seen the flag by then, and waking costs a store that all
  // cores must observe. `place`: of this rank's input, for kPacked.
  void publish(Stage stage, std::uint64_t place = 0) const {
    memory_->publish(stage, number_, place);
  }

 private:
  HostMemory* memory_;
  std::uint64_t number_;
};

}  // namespace horoplug
