// What moving data costs, in microseconds: the two constants of every kind of link, from which the
// table of algorithms computes what an algorithm would take. They are the same on all ranks, or
// these would choose differently.
#pragma once

#include <array>

#include "base/types.h"

namespace horoplug {

struct LinkCosts {
  double latency;  // of a message until the other side has it
  double byte;     // each
};

struct Costs {
  // A guess for streams, where only the ratio counts: a message costs about as much as 64 KiB of
  // payload. Between hosts both are measured at the start.
  LinkCosts stream{20.0, 1.0 / 3000.0};
  LinkCosts shared{1.0, 1.0 / 20000.0};
  // Of MPI's own collectives over all ranks, by OpKind: of one that is very small, and each byte
  // more of those that all ranks know of (Call::bytes).
  std::array<LinkCosts, kOpKindCount> mpi = guessed_of_mpi();
  // Between GPUs, by NCCL.
  LinkCosts gpus{15.0, 1.0 / 100000.0};
  // Between GPUs of one host, by kernels that read the others' memory. Two guesses, as long as they
  // have not been measured, by which NCCL goes first wherever it can be used.
  LinkCosts ipc{20.0, 1.0 / 40000.0};
  // Between a GPU and the host's memory.
  LinkCosts bus{10.0, 1.0 / 20000.0};
  // One more message of several that travel side by side: above all, waking up for it.
  double message = 15.0;

  static constexpr std::array<LinkCosts, kOpKindCount> guessed_of_mpi() {
    std::array<LinkCosts, kOpKindCount> costs{};
    costs.fill({40.0, 1.0 / 1500.0});
    return costs;
  }
};

}  // namespace horoplug
