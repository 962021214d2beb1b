// What the algorithms that leave the work to MPI's own collectives have in common.
//
// MPI counts its collectives: the n-th of one rank meets the n-th of every other. Batches of the
// set of all ranks run in the same order on all of them, one after the other; and what has begun
// here must have been joined by all, since MPI takes nothing back: in a plan, ranks meet first, by
// other means (Algorithm::defers_writes).
//
// What MPI is given is never memory of the user's: MPI may still use it when the operation has
// failed.
#pragma once

#include <cstddef>
#include <span>
#include <system_error>

#include "collectives/collective.h"

namespace horoplug {

// What MPI has refused, as an error that ends the operation.
[[noreturn]] void mpi_has_failed(const std::system_error& error);

// The end of something that MPI has begun. Who is late it does not say.
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

// The operation by which MPI reduces.
inline ReduceOp mpi_reduction(const Call& call) {
  return call.reduce_op == ReduceOp::kAverage ? ReduceOp::kSum : call.reduce_op;
}

// Applies the call's factors to what MPI has reduced, and makes every NaN the same one: which of
// two survives depends on their order, which is MPI's affair.
void finish_reduction(const Call& call, std::byte* data, std::size_t elements);

// What a buffer of so many bytes takes in lent memory that has others after it: no two begin at the
// same address, which some MPIs refuse even if there is nothing in them.
constexpr std::size_t mpi_room(std::size_t bytes) { return (bytes / 64 + 1) * 64; }

// Parts of a buffer as MPI takes them, in memory that is lent to it as well. Counted in units of so
// many bytes each.
class MpiParts {
 public:
  // The memory that a table takes.
  static std::size_t room(int ranks) {
    return mpi_room(2 * static_cast<std::size_t>(ranks) * sizeof(int));
  }
  MpiParts(std::byte* memory, std::span<const std::size_t> bytes, std::size_t unit = 1);
  const Mpi::Parts& table() const { return table_; }

 private:
  Mpi::Parts table_;
};

}  // namespace horoplug
