// Adasum over streams by vector halving and distance doubling: ADASUMRVH of Maleki et al. ("Scaling
// Distributed Training with Adaptive Summation", MLSys 2021), after the allreduce of Rabenseifner
// (Thakur, Rabenseifner and Gropp, 2005). At distance d the ranks r and r ^ d,
// which represent d ranks each, divide their current range. Each rank sends one half of its vector,
// receives the other half of its partner's, and combines it. The dot products of whole tensors are
// sums over the 2d ranks that hold their parts. At the end every rank has its share of the result,
// and the shares are gathered on the way back.
//
// The data volume equals that of a ring, in log2(p) exchanges instead of p - 1, plus the dot
// products.
#include "base/cache_line.h"
#include "collectives/adasum/adasum.h"
#include "collectives/collective.h"
#include "collectives/stream/exchange.h"

namespace horoplug {
namespace {

// Adds the dot products of the ranks that differ from this one in the bits from `distance` down.
// The first exchange is between the two ranks whose halves were one part before the last halving:
// this is the same tree as in AdasumSlices::dots, and all of these ranks get the same bits.
Task sum_dots(Comm& comm, int distance, std::vector<DotProducts>& dots) {
  const std::size_t bytes = dots.size() * sizeof(DotProducts);
  std::vector<DotProducts> theirs(dots.size());
  Comm::Queued queued(comm);
  for (; distance >= 1; distance /= 2) {
    const int peer = comm.rank() ^ distance;
    send_all(comm, peer, dots.data(), bytes);
    co_await receive_all(comm, peer, theirs.data(), bytes);
    co_await comm.flushed();
    for (std::size_t i = 0; i < dots.size(); ++i) dots[i] = dots[i] + theirs[i];
  }
  queued.have_left();
}

}  // namespace

Task allreduce_adasum_halving(Comm& comm, Call& call) {
  Layout& layout = *call.layout;
  const AdasumSlices slices(layout, comm.size());
  const std::size_t element = dtype_size(call.dtype);
  const std::size_t wide = dtype_size(adasum_dtype(call.dtype));
  const bool widens = adasum_dtype(call.dtype) != call.dtype;

  // Inputs and results are in `whole`. Intermediate results are there, too, or in `apart` if they
  // are wider.
  const std::size_t half = std::max(slices.elements(slices.all().lower_half()),
                                    slices.elements(slices.all().upper_half()));
  std::byte* whole = layout.contiguous_output();
  std::byte* apart = nullptr;
  if (whole == nullptr || widens) {
    const std::size_t own = whole == nullptr ? round_up_to_lines(layout.bytes()) : 0;
    std::byte* const work = comm.scratch(Scratch::kWork, own + (widens ? half * wide : 0));
    if (whole == nullptr) whole = work;
    apart = work + own;
  }
  std::byte* const theirs = comm.scratch(Scratch::kReceive, half * wide);
  slices.pack({0, layout.bytes()}, whole);

  std::byte* mine = whole;
  DType dtype = call.dtype;
  SliceRange own = slices.all();
  std::vector<SliceRange> larger;  // the range of `own` before each halving
  for (int distance = 1; distance < comm.size(); distance *= 2) {
    const int peer = comm.rank() ^ distance;
    const bool upper = (comm.rank() & distance) != 0;
    const SliceRange kept = upper ? own.upper_half() : own.lower_half();
    const SliceRange given = upper ? own.lower_half() : own.upper_half();
    const auto place = [&](SliceRange range) {
      return mine + (slices.place(range.begin) - slices.place(own.begin)) * dtype_size(dtype);
    };
    send_all(comm, peer, place(given), slices.elements(given) * dtype_size(dtype));
    co_await receive_all(comm, peer, theirs, slices.elements(kept) * dtype_size(dtype));
    std::byte* const ours = place(kept);
    const std::byte* const a = upper ? theirs : ours;
    const std::byte* const b = upper ? ours : theirs;
    auto dots = slices.dots(dtype, kept, a, b);
    co_await sum_dots(comm, distance, dots);

    std::byte* const to = dtype == adasum_dtype(dtype) ? ours : apart;
    slices.combine(dtype, kept, a, b, dots, to);
    mine = to;
    dtype = adasum_dtype(dtype);
    larger.push_back(own);
    own = kept;
  }

  const auto result = [&](SliceRange range) { return whole + slices.place(range.begin) * element; };
  finish_adasum(call.dtype, result(own), mine, slices.elements(own), call.finish);
  for (int distance = comm.size() / 2; distance >= 1; distance /= 2) {
    const int peer = comm.rank() ^ distance;
    const SliceRange both = larger.back();
    larger.pop_back();
    const bool upper = (comm.rank() & distance) != 0;
    const SliceRange other = upper ? both.lower_half() : both.upper_half();
    send_all(comm, peer, result(own), slices.elements(own) * element);
    co_await receive_all(comm, peer, result(other), slices.elements(other) * element);
    own = both;
  }
  co_await comm.flushed();
  slices.unpack({0, layout.bytes()}, whole);
}

}  // namespace horoplug
