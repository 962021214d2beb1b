// A collective's view of its process set: ranks 0 … size-1, the links between them, and the memory
// that ranks of one host share.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "base/host_grid.h"
#include "base/task.h"
#include "collectives/costs.h"
#include "collectives/tuning.h"
#include "trace/batch_trace.h"
#include "transport/link.h"
#include "transport/mpi/mpi.h"
#include "transport/shm/host_memory.h"

namespace horoplug {

class GpuGroup;

// Working memory that a process set keeps between its collectives.
enum class Scratch : int { kWork = 0, kReceive, kMpi };

class Comm {
 public:
  // `lanes`: the links to each rank of the set; this rank's own entry is empty. `host_memory`: the
  // memory that all ranks share; nullptr unless all are on one host.
  Comm(int rank, std::vector<std::vector<Link*>> lanes, HostMemory* host_memory,
       const Costs& costs = {});

  // For a set that spans several hosts. `shares`: whether the ranks of every host with several
  // ranks share memory, which is `local_memory` on this host.
  void set_hosts(HostGrid hosts, HostMemory* local_memory, bool shares);

  // Of the coroutines that work on this communicator.
  FrameMemory& frame_memory() { return frame_memory_; }

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(peers_.size()); }
  HostMemory* host_memory() const { return host_memory_; }
  // The hosts of the ranks; nullptr if every rank has a host of its own, or all have the same.
  const HostGrid* hosts() const { return hosts_ ? &*hosts_ : nullptr; }
  // Whether algorithms can work in the memory of each host and between hosts: there are several
  // hosts, at least one of them has several ranks, and the ranks of each host share memory.
  bool works_in_hosts() const { return local_comm_ != nullptr; }
  // If so: this host's memory (nullptr if this rank is alone there), the ranks of this host, and
  // the ranks of all hosts with the local rank of this one (nullptr if a host has none). The
  // communicators run batches of their own within the batch of the set.
  HostMemory* local_memory() const { return local_memory_; }
  Comm* local_comm() const { return local_comm_.get(); }
  Comm* cross_comm() const { return cross_comm_.get(); }
  // MPI, if its own collectives run over exactly the ranks of this set, and no other set uses them;
  // nullptr otherwise.
  void set_mpi(Mpi* mpi) { mpi_ = mpi; }
  Mpi* mpi() const { return mpi_; }
  // The set spans hosts, and what leaves a host has to be encrypted, which NCCL does not do.
  void forbid_nccl() { nccl_forbidden_ = true; }
  bool nccl_forbidden() const { return nccl_forbidden_; }
  // The GPUs of the set's ranks; nullptr before the first operation on GPU tensors.
  void set_gpu(std::shared_ptr<GpuGroup> gpu) { gpu_ = std::move(gpu); }
  GpuGroup* gpu() const { return gpu_.get(); }
  // As measured, with the tuner's corrections.
  const Costs& costs() const { return costs_; }

  // Enters and leaves the batch whose frames the calls below send and receive. `trace` may be
  // nullptr.
  void begin(const Channel& channel, BatchTrace* trace = nullptr, const Tuning& tuning = {});
  void end();
  // Leaves a batch that not all ranks have joined, as if it had not begun. Its coroutine must have
  // been destroyed.
  void withdraw();
  // The plan of an epoch has ended. drop() discards, at once, what peers have sent for this batch
  // of the plan and later ones; resume(), when no batch of the plan runs any more, lets all ranks
  // continue from the same point.
  void drop(const Channel& first_dropped);
  void resume();
  BatchTrace* trace() const { return trace_; }
  // Whether the batch may still be withdrawn: it belongs to a plan, whose batches ranks join
  // without negotiation, and not all ranks have joined it.
  bool planned() const { return channel_.epoch != 0 && !committed_; }
  // All ranks have joined the batch.
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

  // Working memory that MPI or a GPU may still write to until give_back(). If the batch fails
  // before that, the memory is leaked.
  class Lease {
   public:
    Lease(Comm& comm, Scratch purpose, std::size_t bytes)
        : comm_(comm), purpose_(purpose), data_(comm.scratch(purpose, bytes)) {}
    ~Lease() {
      if (!back_)
        static_cast<void>(comm_.scratch_[static_cast<std::size_t>(purpose_)].first.release());
    }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;

    std::byte* data() const { return data_; }
    void give_back() { back_ = true; }

   private:
    Comm& comm_;
    const Scratch purpose_;
    std::byte* const data_;
    bool back_ = false;
  };

  // Appends the global ranks of all other ranks of the set.
  void everyone_else(std::vector<int>& ranks) const;

  // Withdraws the messages of this batch that are queued and not sent yet.
  void take_back();

  // A guard for the time that an algorithm runs. Queued messages point to memory of the algorithm
  // and its callers. If the algorithm ends early, by an exception or because its coroutine is
  // destroyed, the guard withdraws the messages before that memory is freed.
  class Queued {
   public:
    explicit Queued(Comm& comm) : comm_(&comm) {}
    ~Queued() {
      if (comm_ != nullptr) comm_->take_back();
    }
    Queued(const Queued&) = delete;
    Queued& operator=(const Queued&) = delete;

    // The algorithm has ended normally: all its messages are sent.
    void have_left() { comm_ = nullptr; }

   private:
    Comm* comm_;
  };

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

  // Messages are cut into chunks of this size or less, so that a chunk is still in the cache when
  // it is reduced, and the next one travels meanwhile.
  std::size_t chunk_bytes() const { return chunk_bytes_; }
  static constexpr std::size_t kChunkBytes = Tuning::kMostChunk;
  static_assert(kChunkBytes == Arena::kSlotBytes);

 private:
  // The first member, so that no frame of a coroutine outlives it.
  FrameMemory frame_memory_;

  // The links to one rank. Message i of a batch travels on lane i modulo their number; both sides
  // count alike.
  struct Peer {
    std::vector<Link*> lanes;
    std::vector<std::uint64_t> tickets;  // by lane: last frame sent in this batch
    std::size_t in_use = 1;              // lanes used in this batch
    std::size_t sent = 0;                // messages of this batch
    std::size_t received = 0;

    bool flushed(const Channel& channel) const;
  };
  std::unique_ptr<Comm> part(const std::vector<int>& ranks, HostMemory* host_memory,
                             const Costs& costs) const;
  Peer& peer(int rank) { return peers_[static_cast<std::size_t>(rank)]; }
  Link& next_lane(int rank) {
    Peer& from = peer(rank);
    return *from.lanes[from.received++ % from.in_use];
  }

  const int rank_;
  std::vector<Peer> peers_;
  HostMemory* const host_memory_;
  const Costs measured_;
  Costs costs_;
  std::size_t chunk_bytes_ = kChunkBytes;
  Mpi* mpi_ = nullptr;
  bool nccl_forbidden_ = false;
  std::shared_ptr<GpuGroup> gpu_;
  std::optional<HostGrid> hosts_;
  HostMemory* local_memory_ = nullptr;
  std::unique_ptr<Comm> local_comm_;
  std::unique_ptr<Comm> cross_comm_;
  Channel channel_;
  bool committed_ = false;
  BatchTrace* trace_ = nullptr;
  std::array<std::pair<std::unique_ptr<std::byte[]>, std::size_t>, 3> scratch_;
};

}  // namespace horoplug
