// GPU tensors by MPI's own collectives, which receive GPU addresses where MPI supports that
// (Mpi::on_gpu).
//
// MPI does not know streams. It is called when the GPU has produced the data, and when no earlier
// work uses the memory that MPI writes. Work on the results is enqueued when MPI has finished. As
// on the host, MPI gets working memory only, and all ranks have joined the batch before MPI is
// called (mpi/common.h).
#include <algorithm>
#include <numeric>

#include "collectives/gpu/gpu_group.h"
#include "collectives/gpu/pack.h"
#include "collectives/mpi/common.h"
#include "collectives/partition.h"

namespace horoplug {
namespace {

using Purpose = cuda::Workspace::Purpose;
using Lease = cuda::Workspace::Lease;

std::size_t sum(std::span<const std::size_t> sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), std::size_t{0});
}

// Waits until the GPU has finished all enqueued work.
Passed done_so_far(cuda::Workspace& workspace) { return Passed(workspace.mark()); }

Task allreduce(Comm& comm, const Call& call) {
  cuda::Workspace& workspace = comm.gpu()->workspace();
  const std::size_t element = dtype_size(call.dtype);
  const std::size_t most = Mpi::kMostElements * element;
  Lease work(workspace, Purpose::kInput, bytes_on_gpu(*call.layout));
  const GpuBuffer buffer(workspace, call, work.address());
  buffer.pack();
  co_await done_so_far(workspace);
  for (std::size_t at = 0; at < buffer.bytes(); at += most) {
    const std::size_t elements = std::min(most, buffer.bytes() - at) / element;
    MpiEnd end(comm, [&](Mpi& mpi) {
      return mpi.allreduce(device_pointer(buffer.to() + at), elements, call.dtype,
                           mpi_reduction(call));
    });
    co_await end;
  }
  work.give_back();
  buffer.unpack_reduced(call.finish);
}

Task broadcast(Comm& comm, const Call& call) {
  cuda::Workspace& workspace = comm.gpu()->workspace();
  const bool is_root = call.root == comm.rank();
  Lease work(workspace, Purpose::kInput, bytes_on_gpu(*call.layout));
  const GpuBuffer buffer(workspace, call, work.address());
  if (is_root) buffer.pack();
  co_await done_so_far(workspace);
  for (std::size_t at = 0; at < buffer.bytes(); at += Mpi::kMostElements) {
    const std::size_t bytes = std::min(Mpi::kMostElements, buffer.bytes() - at);
    MpiEnd end(comm, [&](Mpi& mpi) {
      return mpi.broadcast(device_pointer(buffer.to() + at), bytes, call.root);
    });
    co_await end;
  }
  work.give_back();
  if (is_root) {
    pass_on_gpu(workspace, call);
  } else {
    buffer.unpack({});
  }
}

Task reducescatter(Comm& comm, const Call& call) {
  cuda::Workspace& workspace = comm.gpu()->workspace();
  const std::size_t own = call.receive_bytes[static_cast<std::size_t>(comm.rank())];
  const std::size_t element = dtype_size(call.dtype);
  Lease input(workspace, Purpose::kInput, bytes_on_gpu(*call.layout));
  Lease result(workspace, Purpose::kOutput, own);
  Comm::Lease table(comm, Scratch::kMpi, MpiParts::room(comm.size()));
  const MpiParts parts(table.data(), call.receive_bytes, element);
  const GpuBuffer buffer(workspace, call, input.address());
  buffer.pack();
  co_await done_so_far(workspace);
  MpiEnd end(comm, [&](Mpi& mpi) {
    return mpi.reducescatter(device_pointer(buffer.to()), device_pointer(result.address()),
                             parts.table().sizes, call.dtype, mpi_reduction(call));
  });
  co_await end;
  input.give_back();
  result.give_back();
  table.give_back();
  const cuda::Transfer output{result.address(), gpu_address(call.output), own / element};
  workspace.launcher().move_reduced(call.dtype, call.finish, {&output, 1});
}

Task allgather(Comm& comm, const Call& call) {
  cuda::Workspace& workspace = comm.gpu()->workspace();
  const Part own = consecutive(call.receive_bytes)[static_cast<std::size_t>(comm.rank())];
  const std::size_t bytes = call.bytes();
  Lease work(workspace, Purpose::kOutput, bytes);
  Comm::Lease table(comm, Scratch::kMpi, MpiParts::room(comm.size()));
  const MpiParts parts(table.data(), call.receive_bytes);
  workspace.copy(work.address() + own.begin, gpu_address(call.input), own.bytes);
  co_await done_so_far(workspace);
  MpiEnd end(
      comm, [&](Mpi& mpi) { return mpi.allgather(device_pointer(work.address()), parts.table()); });
  co_await end;
  work.give_back();
  table.give_back();
  workspace.copy(gpu_address(call.output), work.address(), bytes);
}

Task alltoall(Comm& comm, const Call& call) {
  cuda::Workspace& workspace = comm.gpu()->workspace();
  const std::size_t outgoing = sum(call.send_bytes), incoming = sum(call.receive_bytes);
  const std::size_t room = MpiParts::room(comm.size());
  Lease input(workspace, Purpose::kInput, outgoing);
  Lease output(workspace, Purpose::kOutput, incoming);
  Comm::Lease tables(comm, Scratch::kMpi, 2 * room);
  const MpiParts sent(tables.data(), call.send_bytes);
  const MpiParts received(tables.data() + room, call.receive_bytes);
  workspace.copy(input.address(), gpu_address(call.input), outgoing);
  co_await done_so_far(workspace);
  MpiEnd end(comm, [&](Mpi& mpi) {
    return mpi.alltoall(device_pointer(input.address()), sent.table(),
                        device_pointer(output.address()), received.table());
  });
  co_await end;
  input.give_back();
  output.give_back();
  tables.give_back();
  workspace.copy(gpu_address(call.output), output.address(), incoming);
}

}  // namespace

Task gpu_mpi(Comm& comm, Call& call) {
  switch (call.kind) {
    case OpKind::kAllreduce:
      return allreduce(comm, call);
    case OpKind::kBroadcast:
      return broadcast(comm, call);
    case OpKind::kReducescatter:
      return reducescatter(comm, call);
    case OpKind::kAllgather:
      return allgather(comm, call);
    default:
      return alltoall(comm, call);
  }
}

}  // namespace horoplug
