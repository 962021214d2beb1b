// Allreduce by MPI's own algorithms, over all ranks of the job.
//
// MPI counts its collectives: the n-th of one rank meets the n-th of every other. Batches of a set
// run in the same order on all ranks, one after the other; and what has begun here must have been
// joined by all, since MPI takes nothing back: in a plan, ranks meet first (Algorithm::commits).
//
// All ranks get the same bits: each element is reduced by one rank for all, or by all in pairs,
// where the order of the two does not matter. But which of two NaNs survives does depend on it, and
// so does a minimum with NaNs, for which MPI is not asked.
#include <algorithm>
#include <array>
#include <system_error>

#include "collectives/collective.h"

namespace horoplug {
namespace {

[[noreturn]] void fail(const std::system_error& error) {
  throw Error(HP_ABORTED, std::string("MPI has failed: ") + error.code().message());
}

// The end of what MPI has begun. Who is late it does not say.
class Reduced final : public Waitable {
 public:
  Reduced(const Comm& comm, const Mpi::Request& request) : comm_(comm), request_(request) {}
  bool ready() override {
    try {
      return comm_.mpi()->test(request_);
    } catch (const std::system_error& error) {
      fail(error);
    }
  }
  void blame(std::vector<int>& ranks) const override { comm_.everyone_else(ranks); }
  bool polled() const override { return true; }

 private:
  const Comm& comm_;
  Mpi::Request request_;
};

Mpi::Request begin(const Comm& comm, const Call& call, std::byte* data, std::size_t elements) {
  const ReduceOp op = call.reduce_op == ReduceOp::kAverage ? ReduceOp::kSum : call.reduce_op;
  try {
    return comm.mpi()->allreduce(data, elements, call.dtype, op);
  } catch (const std::system_error& error) {
    fail(error);
  }
}

// Applies the call's factors, and makes every NaN the same one. Adding -0.0 changes nothing else.
void finish(const Call& call, std::byte* data, std::size_t elements) {
  if (!is_floating(call.dtype)) {
    const void* const source = data;
    if (!call.finish.is_identity()) call.reduce(data, &source, 1, elements, call.finish);
    return;
  }
  constexpr std::size_t kBlock = 512;
  std::array<std::byte, kBlock * sizeof(double)> zeros{};
  const std::size_t element = dtype_size(call.dtype);
  // -0.0 of any float: its highest bit, in its last byte.
  for (std::size_t i = 1; i <= kBlock; ++i) zeros[i * element - 1] = std::byte{0x80};
  const ReduceFn sum =
      kernels().reduce[static_cast<int>(ReduceOp::kSum)][static_cast<int>(call.dtype)];
  for (std::size_t at = 0; at < elements; at += kBlock) {
    std::byte* const block = data + at * element;
    const void* const sources[] = {block, zeros.data()};
    sum(block, sources, 2, std::min(kBlock, elements - at), call.finish);
  }
}

}  // namespace

Task allreduce_mpi(Comm& comm, Call& call) {
  Layout& layout = *call.layout;
  const std::size_t element = dtype_size(call.dtype);
  const std::size_t most = Mpi::kMostElements * element;
  // Never memory of the user's: MPI may still use it when the operation has failed.
  Comm::Lent work(comm, Scratch::kMpi, layout.bytes());
  layout.pack(0, layout.bytes(), work.data());
  for (std::size_t at = 0; at < layout.bytes(); at += most) {
    const std::size_t elements = std::min(most, layout.bytes() - at) / element;
    co_await Reduced(comm, begin(comm, call, work.data() + at, elements));
  }
  work.give_back();
  finish(call, work.data(), layout.elements());
  layout.unpack(0, layout.bytes(), work.data());
}

}  // namespace horoplug
