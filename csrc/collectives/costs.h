// The cost model, in microseconds: two constants for each kind of link (alpha and beta of Hockney,
// "The communication challenge for MPP", 1994),
// from which the table of algorithms estimates durations. They must be equal on all ranks;
// otherwise ranks would choose different algorithms.
#pragma once

#include <array>

#include "base/types.h"

namespace horoplug {

struct LinkCosts {
  double latency;  // of a message, until the receiver has it
  double byte;     // of each further byte
};

struct Costs {
  // An estimate for streams, where only the ratio matters: a message costs about as much as 64 KiB
  // of payload. Between hosts both constants are measured at the start.
  LinkCosts stream{20.0, 1.0 / 3000.0};
  LinkCosts shared{1.0, 1.0 / 20000.0};
  // MPI's own collectives over all ranks, by OpKind: the time of a minimal one, and of each byte of
  // Call::bytes.
  std::array<LinkCosts, kOpKindCount> mpi = guessed_of_mpi();
  // Between GPUs, by NCCL.
  LinkCosts gpus{15.0, 1.0 / 100000.0};
  // Between GPUs of one host, by kernels that read other GPUs' memory. These are estimates, not
  // measurements, that prefer NCCL wherever it can be used.
  LinkCosts ipc{20.0, 1.0 / 40000.0};
  // Between a GPU and the CPU's memory.
  LinkCosts bus{10.0, 1.0 / 20000.0};
  // One further concurrent message: mainly the wake-up for it.
  double message = 15.0;

  static constexpr std::array<LinkCosts, kOpKindCount> guessed_of_mpi() {
    std::array<LinkCosts, kOpKindCount> costs{};
    costs.fill({40.0, 1.0 / 1500.0});
    return costs;
  }
};

}  // namespace horoplug
