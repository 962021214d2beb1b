// The order in which batches of several process sets are enqueued on the ranks' GPUs.
//
// Work on a GPU waits for other ranks' GPUs, and CUDA's driver may block a rank's host thread until
// all of it is done: for example when it loads a kernel, allocates memory, or has a full queue. If
// one rank's GPU had set A's batch before set B's, and another rank's the reverse, both hosts could
// be blocked from ever enqueuing the other batch. (NCCL also requires that communicators are used
// in the same order on all ranks.) Therefore all ranks enqueue batches in one order, and a batch
// begins when it is its turn on all ranks of its set. A blocked host then waits only for earlier
// batches, which wait for no later one.
//
// Sets are independent of each other, and any ranks may be members of them. The order follows from
// numbers: for each batch, every rank of its set proposes a number higher than all it has seen, and
// the maximum becomes the batch's number (Skeen's algorithm, as in Birman and Joseph, "Reliable
// communication in the presence of failures", 1987: one exchange among the set's ranks). On a rank
// it is a batch's turn when no other batch has, or can still get, a lower number.
#pragma once

#include <cstdint>
#include <map>

#include "base/task.h"
#include "collectives/comm.h"

namespace horoplug {

// The state of one rank. Used by the thread that runs the progress loop.
class GpuTurns {
 private:
  friend class GpuTurn;
  struct Turn {
    std::uint64_t number = 0;  // or the proposed number, which is not higher
    const Comm* comm = nullptr;
  };
  std::uint64_t highest_ = 0;
  std::map<std::uint32_t, Turn> waiting_;  // by set; a set has one batch at a time
};

// The turn of one batch of a set. It ends with the destruction of this object.
class GpuTurn {
 public:
  GpuTurn(GpuTurns& turns, std::uint32_t set) : turns_(turns), set_(set) {}
  ~GpuTurn() { turns_.waiting_.erase(set_); }
  GpuTurn(const GpuTurn&) = delete;
  GpuTurn& operator=(const GpuTurn&) = delete;

  // Collective. Returns when it is the batch's turn on all ranks of the set.
  Task come(Comm& comm);

 private:
  class First;  // NOLINT(*-virtual-class-destructor): final, which a declaration cannot say
  GpuTurns& turns_;
  const std::uint32_t set_;
};

}  // namespace horoplug
