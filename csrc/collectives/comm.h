// One collective's view of its process set: ranks 0 … size-1, messages between them, and shared
// memory if they have it.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <vector>

#include "base/task.h"
#include "collectives/costs.h"
#include "collectives/tuning.h"
#include "trace/batch_trace.h"
#include "transport/link.h"
#include "transport/mpi/mpi.h"
#include "transport/shm/arena.h"

namespace horoplug {

class GpuGroup;

// Working memory that a process set keeps between its collectives.
enum class Scratch : int { kWork = 0, kReceive, kMpi };

class Comm {
 public:
  // `lanes` by rank of the set: the links to it, none at this rank's own place. `shared` is nullptr
  // unless all are on one host.
  Comm(int rank, std::vector<std::vector<Link*>> lanes, SharedGroup* shared,
       const Costs& costs = {});

  // For a set that spans hosts with the same number of ranks each, more than one: the memory of
  // this host's ranks and these, by place; and by host, in the order of their first ranks, those
  // ranks of the set that have this one's place on theirs.
  void set_local(SharedGroup* local, const std::vector<int>& host, const std::vector<int>& slice);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(peers_.size()); }
  SharedGroup* shared() const { return shared_; }
  // What set_local() has given, or nullptr. The ranks of the host and those of the slice run
  // batches of their own within the batch of the set.
  SharedGroup* local() const { return local_; }
  Comm* host() const { return host_.get(); }
  Comm* slice() const { return slice_.get(); }
  // MPI, whose own collectives work on exactly the ranks of the set and are used by no other one,
  // or nullptr.
  void set_mpi(Mpi* mpi) { mpi_ = mpi; }
  Mpi* mpi() const { return mpi_; }
  // The set's ranks' GPUs, once an operation on tensors there has come; nullptr before.
  void set_gpu(std::shared_ptr<GpuGroup> gpu) { gpu_ = std::move(gpu); }
  GpuGroup* gpu() const { return gpu_.get(); }
  // As measured, and corrected by what has proved good since.
  const Costs& costs() const { return costs_; }

  // Enters and leaves the batch whose frames the calls below send and receive. `trace`, if there is
  // one, is told what happens in it.
  void begin(const Channel& channel, BatchTrace* trace = nullptr, const Tuning& tuning = {});
  void end();
  // Leaves a batch that not all ranks have joined, after its coroutine is gone: as if it had not
  // begun.
  void withdraw();
  // The plan of an epoch has ended: what peers have sent of it for this batch and those after it is
  // dropped (at once), and the ranks go on together from the same point (when what still runs of
  // the plan is done).
  void drop(const Channel& first_dropped);
  void resume();
  BatchTrace* trace() const { return trace_; }
  // The batch is a plan's: ranks join it unasked, and it may be withdrawn until all have.
  bool planned() const { return channel_.epoch != 0 && !committed_; }
  // All have joined it, and it is like any other from here on.
  void commit();

  // Queues a message of at most kChunkBytes to a rank. `data` must stay as it is until flushed().
  void send(int rank, const void* data, std::size_t bytes);
  // Posts the receive of the next message from a rank.
  Link::Receive receive(int rank, void* data, std::size_t bytes) {
    return {next_lane(rank), channel_, data, bytes};
  }

  // The same, appended to a window of posted receives.
  void post(std::deque<Link::Receive>& window, int rank, void* data, std::size_t bytes) {
    window.emplace_back(next_lane(rank), channel_, data, bytes);
  }

  // At least `bytes` bytes of working memory, aligned to cache lines; valid until the next call for
  // the same purpose.
  std::byte* scratch(Scratch purpose, std::size_t bytes);

  // Working memory that somebody else may write to until it is given back: if it never is, since
  // the batch has failed, the memory is leaked.
  class Lent {
   public:
    Lent(Comm& comm, Scratch purpose, std::size_t bytes)
        : comm_(comm), purpose_(purpose), data_(comm.scratch(purpose, bytes)) {}
    ~Lent() {
      if (!back_)
        static_cast<void>(comm_.scratch_[static_cast<std::size_t>(purpose_)].first.release());
    }
    Lent(const Lent&) = delete;
    Lent& operator=(const Lent&) = delete;

    std::byte* data() const { return data_; }
    void give_back() { back_ = true; }

   private:
    Comm& comm_;
    const Scratch purpose_;
    std::byte* const data_;
    bool back_ = false;
  };

  // Adds the global ranks of all others.
  void everyone_else(std::vector<int>& ranks) const;

  // Waits until everything that was sent in this batch has left.
  class Flushed final : public Waitable {
   public:
    explicit Flushed(const Comm& comm) : comm_(comm) {}
    bool ready() override;
    void blame(std::vector<int>& ranks) const override;

   private:
    const Comm& comm_;
  };
  Flushed flushed() const { return Flushed(*this); }

  // Messages are cut into pieces of this size or less, so that a piece is still in the cache when
  // it is reduced, and the next one travels meanwhile.
  std::size_t chunk_bytes() const { return chunk_bytes_; }
  static constexpr std::size_t kChunkBytes = Tuning::kMostChunk;
  static_assert(kChunkBytes == Arena::kSlotBytes);

 private:
  // The way to one rank. Message i of a batch travels on lane i mod their number; both sides count
  // alike.
  struct Peer {
    std::vector<Link*> lanes;
    std::vector<std::uint64_t> tickets;  // by lane: last frame sent in this batch
    std::size_t in_use = 1;              // lanes, in this batch
    std::size_t sent = 0;                // messages of this batch
    std::size_t received = 0;

    bool flushed() const;
  };
  std::unique_ptr<Comm> part(const std::vector<int>& ranks, SharedGroup* shared) const;
  Peer& peer(int rank) { return peers_[static_cast<std::size_t>(rank)]; }
  Link& next_lane(int rank) {
    Peer& from = peer(rank);
    return *from.lanes[from.received++ % from.in_use];
  }

  const int rank_;
  std::vector<Peer> peers_;
  SharedGroup* const shared_;
  const Costs measured_;
  Costs costs_;
  std::size_t chunk_bytes_ = kChunkBytes;
  Mpi* mpi_ = nullptr;
  std::shared_ptr<GpuGroup> gpu_;
  SharedGroup* local_ = nullptr;
  std::unique_ptr<Comm> host_;
  std::unique_ptr<Comm> slice_;
  Channel channel_;
  bool committed_ = false;
  BatchTrace* trace_ = nullptr;
  std::array<std::pair<std::unique_ptr<std::byte[]>, std::size_t>, 3> scratch_;
};

}  // namespace horoplug
