// Shared parts of the algorithms that use MPI's own collectives.
//
// MPI matches collectives by their order: the n-th call of one rank matches the n-th call of every
// other rank. Batches of the set of all ranks run in the same order on all ranks, one after the
// other. An MPI call cannot be withdrawn, so all ranks must have joined a batch before it starts
// here: in a plan, ranks run a barrier first, without MPI (Algorithm::defers_writes).
//
// MPI never gets user memory: it may still access its buffers after the operation has failed.
#pragma once

#include <cstddef>
#include <span>
#include <system_error>

#include "base/cache_line.h"
#include "collectives/collective.h"

namespace horoplug {

// Converts a rejection by MPI to an error that ends the operation.
[[noreturn]] void mpi_has_failed(const std::system_error& error);

// Waits for the end of an MPI request. MPI does not tell which rank is late.
class MpiEnd final : public Waitable {
 public:
  // `begin(mpi)` returns the request.
  template <typename Begin>
  MpiEnd(const Comm& comm, Begin&& begin) : comm_(comm), request_(begun(*comm.mpi(), begin)) {}

  bool ready() override;
  void blame(std::vector<int>& ranks) const override { comm_.everyone_else(ranks); }
  bool polled() const override { return true; }

 private:
  template <typename Begin>
  static Mpi::Request begun(Mpi& mpi, Begin& begin) {
    try {
      return begin(mpi);
    } catch (const std::system_error& error) {
      mpi_has_failed(error);
    }
  }

  const Comm& comm_;
  Mpi::Request request_;
};

// The reduction operator that MPI uses.
inline ReduceOp mpi_reduction(const Call& call) {
  return call.reduce_op == ReduceOp::kAverage ? ReduceOp::kSum : call.reduce_op;
}

// Applies the call's factors to MPI's result, and replaces every NaN by the same one: the choice
// between two NaNs depends on MPI's order of operands.
void finish_reduction(const Call& call, std::byte* data, std::size_t elements);

// The size of a buffer of so many bytes within leased memory. No two buffers begin at the same
// address: some MPI libraries reject that even for empty buffers.
constexpr std::size_t mpi_room(std::size_t bytes) { return (bytes / kCacheLine + 1) * kCacheLine; }

// Parts of a buffer as MPI's count and displacement arrays, which also lie in leased memory. The
// unit is so many bytes.
class MpiParts {
 public:
  // The memory that an array takes.
  static std::size_t room(int ranks) {
    return mpi_room(2 * static_cast<std::size_t>(ranks) * sizeof(int));
  }
  MpiParts(std::byte* memory, std::span<const std::size_t> bytes, std::size_t unit = 1);
  const Mpi::Parts& table() const { return table_; }

 private:
  Mpi::Parts table_;
};

}  // namespace horoplug
