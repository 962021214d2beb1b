// MPI's own collectives on tensors in the CPU's memory: a table describes the arguments of each.
//
// All ranks get the same bits from a reduction: each element is reduced by one rank for all, or by
// all ranks in pairs, where the order of the two operands does not matter. Only the choice between
// two NaNs depends on the order, and so does a minimum with NaNs, for which MPI is not used
// (registry.cc).
#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>

#include "collectives/mpi/common.h"
#include "collectives/partition.h"

namespace horoplug {
namespace {

std::size_t sum(std::span<const std::size_t> parts) {
  return std::accumulate(parts.begin(), parts.end(), std::size_t{0});
}

std::size_t rank_of(const Comm& comm) { return static_cast<std::size_t>(comm.rank()); }

// The buffers that MPI reads and writes. In place, `input` equals `output`.
struct Buffers {
  std::byte* input;
  std::byte* output;
  Mpi::Parts sent, received;
};

struct MpiCollective {
  OpKind kind;
  // The bytes that MPI reads and writes on this rank. Without `output_bytes` the collective works
  // in place.
  std::size_t (*input_bytes)(const Comm&, const Call&);
  std::size_t (*output_bytes)(const Comm&, const Call&) = nullptr;
  void (*pack)(const Comm&, const Call&, const Buffers&);
  // Starts the collective for a segment of the buffer, in bytes.
  Mpi::Request (*begin)(Mpi&, const Call&, const Buffers&, const Part& segment);
  void (*unpack)(const Comm&, const Call&, const Buffers&);
  // Data beyond MPI's count limit is processed in segments. Empty buffers are skipped.
  bool in_segments = false;
};

std::size_t no_bytes(const Comm&, const Call&) { return 0; }
std::size_t layout_bytes(const Comm&, const Call& call) { return call.layout->bytes(); }
std::size_t sent_bytes(const Comm&, const Call& call) { return sum(call.send_bytes); }
std::size_t received_bytes(const Comm&, const Call& call) { return sum(call.receive_bytes); }
std::size_t own_bytes(const Comm& comm, const Call& call) {
  return call.receive_bytes[rank_of(comm)];
}

void nothing(const Comm&, const Call&, const Buffers&) {}
void pack_layout(const Comm&, const Call& call, const Buffers& buffers) {
  call.layout->pack(0, call.layout->bytes(), buffers.input);
}
void copy_out(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

constexpr MpiCollective kMpiCollectives[] = {
    {.kind = OpKind::kAllreduce,
     .input_bytes = layout_bytes,
     .pack = pack_layout,
     .begin =
         [](Mpi& mpi, const Call& call, const Buffers& buffers, const Part& segment) {
           return mpi.allreduce(buffers.output + segment.begin,
                                segment.bytes / dtype_size(call.dtype), call.dtype,
                                mpi_reduction(call));
         },
     .unpack =
         [](const Comm&, const Call& call, const Buffers& buffers) {
           finish_reduction(call, buffers.output, call.layout->bytes() / dtype_size(call.dtype));
           call.layout->unpack(0, call.layout->bytes(), buffers.output);
         },
     .in_segments = true},
    {.kind = OpKind::kReducescatter,
     .input_bytes = layout_bytes,
     .output_bytes = own_bytes,
     .pack = pack_layout,
     .begin =
         [](Mpi& mpi, const Call& call, const Buffers& buffers, const Part&) {
           return mpi.reducescatter(buffers.input, buffers.output, buffers.received.sizes,
                                    call.dtype, mpi_reduction(call));
         },
     .unpack =
         [](const Comm& comm, const Call& call, const Buffers& buffers) {
           const std::size_t bytes = own_bytes(comm, call);
           finish_reduction(call, buffers.output, bytes / dtype_size(call.dtype));
           copy_out(call.output, buffers.output, bytes);
         }},
    {.kind = OpKind::kBroadcast,
     .input_bytes = layout_bytes,
     .pack =
         [](const Comm& comm, const Call& call, const Buffers& buffers) {
           if (comm.rank() == call.root) pack_layout(comm, call, buffers);
         },
     .begin =
         [](Mpi& mpi, const Call& call, const Buffers& buffers, const Part& segment) {
           return mpi.broadcast(buffers.output + segment.begin, segment.bytes, call.root);
         },
     .unpack =
         [](const Comm&, const Call& call, const Buffers& buffers) {
           call.layout->unpack(0, call.layout->bytes(), buffers.output);
         },
     .in_segments = true},
    {.kind = OpKind::kAllgather,
     .input_bytes = received_bytes,
     .pack =
         [](const Comm& comm, const Call& call, const Buffers& buffers) {
           const Part own = consecutive(call.receive_bytes)[rank_of(comm)];
           copy_out(buffers.input + own.begin, call.input, own.bytes);
         },
     .begin = [](Mpi& mpi, const Call&, const Buffers& buffers,
                 const Part&) { return mpi.allgather(buffers.output, buffers.received); },
     .unpack =
         [](const Comm& comm, const Call& call, const Buffers& buffers) {
           copy_out(call.output, buffers.output, received_bytes(comm, call));
         }},
    {.kind = OpKind::kAlltoall,
     .input_bytes = sent_bytes,
     .output_bytes = received_bytes,
     .pack =
         [](const Comm& comm, const Call& call, const Buffers& buffers) {
           copy_out(buffers.input, call.input, sent_bytes(comm, call));
         },
     .begin =
         [](Mpi& mpi, const Call&, const Buffers& buffers, const Part&) {
           return mpi.alltoall(buffers.input, buffers.sent, buffers.output, buffers.received);
         },
     .unpack =
         [](const Comm& comm, const Call& call, const Buffers& buffers) {
           copy_out(call.output, buffers.output, received_bytes(comm, call));
         }},
    // Excludes the barrier of a plan's batch: an MPI call cannot be withdrawn.
    {.kind = OpKind::kBarrier,
     .input_bytes = no_bytes,
     .pack = nothing,
     .begin = [](Mpi& mpi, const Call&, const Buffers&, const Part&) { return mpi.barrier(); },
     .unpack = nothing},
};

const MpiCollective& collective_of(OpKind kind) {
  const auto* const found =
      std::find_if(std::begin(kMpiCollectives), std::end(kMpiCollectives),
                   [kind](const MpiCollective& row) { return row.kind == kind; });
  if (found == std::end(kMpiCollectives)) {
    throw std::logic_error(std::string("MPI has no function for ") + op_kind_name(kind));
  }
  return *found;
}

}  // namespace

Task cpu_mpi(Comm& comm, Call& call) {
  const MpiCollective& collective = collective_of(call.kind);
  const bool in_place = collective.output_bytes == nullptr;
  const std::size_t input = collective.input_bytes(comm, call);
  const std::size_t output = in_place ? 0 : collective.output_bytes(comm, call);
  const std::size_t element = dtype_size(call.dtype);
  const std::size_t unit = collective.kind == OpKind::kReducescatter ? element : 1;

  const std::size_t room = call.receive_bytes.empty() ? 0 : MpiParts::room(comm.size());
  Comm::Lease work(comm, Scratch::kMpi, 2 * room + mpi_room(input) + mpi_room(output));
  if (call.kind == OpKind::kBarrier) work.give_back();  // MPI gets no memory
  std::byte* const data = work.data() + 2 * room;
  Buffers buffers{data, in_place ? data : data + mpi_room(input), {}, {}};
  if (!call.send_bytes.empty()) buffers.sent = MpiParts(work.data(), call.send_bytes).table();
  if (!call.receive_bytes.empty()) {
    buffers.received = MpiParts(work.data() + room, call.receive_bytes, unit).table();
  }
  collective.pack(comm, call, buffers);
  const std::size_t most = Mpi::kMostElements * (reduces(call.kind) ? element : 1);
  const std::size_t segments = collective.in_segments ? chunk_count(input, most) : 1;
  for (std::size_t i = 0; i < segments; ++i) {
    const Part segment = chunk_of({0, input}, i, most);
    MpiEnd end(comm, [&](Mpi& mpi) { return collective.begin(mpi, call, buffers, segment); });
    co_await end;
  }
  work.give_back();
  collective.unpack(comm, call, buffers);
}

}  // namespace horoplug
