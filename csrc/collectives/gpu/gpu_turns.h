// The order in which batches of several process sets come to the ranks' GPUs.
//
// What is on a GPU waits for other ranks' GPUs, and CUDA's driver may keep a rank's host until
// all of it is done: when it loads a kernel or finds memory, for example, or when a queue of its
// own is full. If one rank's GPU had set A's batch before set B's, and another one's had B's
// before A's, both hosts could be kept from ever bringing the other batch. (NCCL wants
// communicators to be used in the same order everywhere, too.) So all ranks bring batches to their
// GPUs in one order, and begin when it is the batch's turn on all ranks of its set. Wherever a
// host is kept then, it is by what came before, which waits for nobody that comes later.
//
// Sets know nothing of each other, and any ranks may be in any of them. The order is that of
// numbers: for each batch every rank of its set proposes one that is higher than all it has seen,
// and the highest of them is the batch's (Skeen's algorithm: one exchange among the set's ranks).
// On a rank it is a batch's turn when no other one there has a lower number, or may get one.
#pragma once

#include <cstdint>
#include <map>

#include "base/task.h"
#include "collectives/comm.h"

namespace horoplug {

// Of one rank. For whoever drives the engine.
class GpuTurns {
 private:
  friend class GpuTurn;
  struct Turn {
    std::uint64_t number = 0;  // or what was proposed, which is not higher
    const Comm* comm = nullptr;
  };
  std::uint64_t highest_ = 0;
  std::map<std::uint32_t, Turn> waiting_;  // by set, which has one batch at a time
};

// Of one batch of a set; it is over when this ends.
class GpuTurn {
 public:
  GpuTurn(GpuTurns& turns, std::uint32_t set) : turns_(turns), set_(set) {}
  ~GpuTurn() { turns_.waiting_.erase(set_); }
  GpuTurn(const GpuTurn&) = delete;
  GpuTurn& operator=(const GpuTurn&) = delete;

  // Collective. Returns when it is the batch's turn on all ranks of the set.
  Task come(Comm& comm);

 private:
  class First;
  GpuTurns& turns_;
  const std::uint32_t set_;
};

}  // namespace horoplug
