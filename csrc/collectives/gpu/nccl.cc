// GPU tensors by NCCL, over the set's communicator.
//
// An NCCL call cannot be withdrawn: in a plan, ranks run a barrier first
// (Algorithm::defers_writes). NCCL's work runs in the order of the set's stream, which is the order
// of batches on all ranks.
#include <algorithm>
#include <vector>

#include "collectives/gpu/gpu_group.h"
#include "collectives/gpu/pack.h"
#include "collectives/partition.h"
#include "device/cuda/runtime/batch.h"

namespace horoplug {
namespace {

// The state that all steps share.
struct NcclContext {
  explicit NcclContext(Comm& of)
      : comm(of),
        workspace(of.gpu()->workspace()),
        nccl(*of.gpu()->nccl()),
        stream(workspace.stream().handle()) {}

  // NCCL has enqueued its work. The first call takes a while, because NCCL sets up its connections.
  Settled settled() const { return {comm, nccl}; }

  Comm& comm;
  cuda::Workspace& workspace;
  cuda::NcclCommunicator& nccl;
  const CUstream stream;
};

Task allreduce(NcclContext t, const Call& call) {
  const GpuBuffer buffer(t.workspace, call);
  buffer.pack();
  t.nccl.allreduce(buffer.from(), buffer.to(), buffer.elements(), call.dtype, call.reduce_op,
                   t.stream);
  co_await t.settled();
  buffer.unpack(call.finish);
}

Task broadcast(NcclContext t, const Call& call) {
  const GpuBuffer buffer(t.workspace, call);
  const bool is_root = call.root == t.comm.rank();
  if (is_root) buffer.pack();
  t.nccl.broadcast(buffer.from(), buffer.to(), buffer.bytes(), call.root, t.stream);
  co_await t.settled();
  if (is_root) {
    pass_on_gpu(t.workspace, call);
  } else {
    buffer.unpack({});
  }
}

// NCCL's parts have one size. The last ranks' parts are shorter by a row, and are padded to the
// size of the first.
Task reducescatter(NcclContext t, const Call& call) {
  const std::size_t element = dtype_size(call.dtype);
  const std::span<const std::size_t> sizes = call.receive_bytes;
  const std::size_t part = *std::max_element(sizes.begin(), sizes.end());
  const GpuBuffer buffer(t.workspace, call);
  buffer.pack();
  const std::uint64_t output = gpu_address(call.output);
  const bool even = buffer.bytes() == part * sizes.size();
  std::uint64_t spread = buffer.from(), result = output;
  if (!even) {
    spread = t.workspace.on_device(cuda::Workspace::Purpose::kOutput, part * (sizes.size() + 1));
    result = spread + part * sizes.size();
    std::vector<cuda::Transfer> parts;
    std::uint64_t from = buffer.from(), to = spread;
    for (const std::size_t bytes : sizes) {
      parts.push_back({from, to, bytes / element});
      from += bytes;
      to += part;
    }
    t.workspace.launcher().move(call.dtype, call.dtype, {}, parts);
  }
  t.nccl.reducescatter(spread, result, part / element, call.dtype, call.reduce_op, t.stream);
  co_await t.settled();
  if (even && call.finish.is_identity()) co_return;
  const std::size_t own = sizes[static_cast<std::size_t>(t.comm.rank())];
  const std::vector<cuda::Transfer> outputs = {{result, output, own / element}};
  t.workspace.launcher().move(call.dtype, call.dtype, call.finish, outputs);
}

Task reduce(NcclContext t, const Call& call) {
  const GpuBuffer buffer(t.workspace, call);
  buffer.pack();
  t.nccl.reduce(buffer.from(), buffer.to(), buffer.elements(), call.dtype, call.reduce_op,
                call.root, t.stream);
  co_await t.settled();
  if (call.root == t.comm.rank()) buffer.unpack(call.finish);
}

Task allgather(NcclContext t, const Call& call) {
  const std::span<const std::size_t> sizes = call.receive_bytes;
  const std::uint64_t from = gpu_address(call.input), to = gpu_address(call.output);
  const bool even = std::all_of(sizes.begin(), sizes.end(),
                                [&](std::size_t size) { return size == sizes.front(); });
  if (even) {
    t.nccl.allgather(from, to, sizes.front(), t.stream);
  } else {
    const std::vector<Part> parts = consecutive(sizes);
    t.nccl.begin();
    for (int rank = 0; rank < t.comm.size(); ++rank) {
      const Part& part = parts[static_cast<std::size_t>(rank)];
      const std::uint64_t there = to + part.begin;
      if (part.bytes == 0) continue;
      t.nccl.broadcast(rank == t.comm.rank() ? from : there, there, part.bytes, rank, t.stream);
    }
    t.nccl.end();
  }
  co_await t.settled();
}

Task alltoall(NcclContext t, const Call& call) {
  const std::vector<Part> sent = consecutive(call.send_bytes);
  const std::vector<Part> received = consecutive(call.receive_bytes);
  t.nccl.begin();
  for (int rank = 0; rank < t.comm.size(); ++rank) {
    const Part& out = sent[static_cast<std::size_t>(rank)];
    const Part& in = received[static_cast<std::size_t>(rank)];
    if (out.bytes > 0) t.nccl.send(gpu_address(call.input) + out.begin, out.bytes, rank, t.stream);
    if (in.bytes > 0) t.nccl.receive(gpu_address(call.output) + in.begin, in.bytes, rank, t.stream);
  }
  t.nccl.end();
  co_await t.settled();
}

// Gather and scatter: between the root and every other rank, and on the root itself.
Task exchange_with_root(NcclContext t, const Call& call) {
  const bool gathers = call.kind == OpKind::kGather;
  const bool is_root = call.root == t.comm.rank();
  const std::vector<Part> parts = consecutive(call.receive_bytes);
  const Part& own = parts[static_cast<std::size_t>(t.comm.rank())];
  const std::uint64_t input = gpu_address(call.input), output = gpu_address(call.output);
  const auto transfer = [&](std::uint64_t data, std::size_t bytes, int peer) {
    if (bytes == 0) return;
    if (gathers == is_root) {
      t.nccl.receive(data, bytes, peer, t.stream);
    } else {
      t.nccl.send(data, bytes, peer, t.stream);
    }
  };
  if (is_root) {
    const std::uint64_t all = gathers ? output : input;
    t.workspace.copy(gathers ? all + own.begin : output, gathers ? input : all + own.begin,
                     own.bytes);
    t.nccl.begin();
    for (int rank = 0; rank < t.comm.size(); ++rank) {
      const Part& part = parts[static_cast<std::size_t>(rank)];
      if (rank != call.root) transfer(all + part.begin, part.bytes, rank);
    }
    t.nccl.end();
  } else {
    transfer(gathers ? input : output, own.bytes, call.root);
  }
  co_await t.settled();
}

}  // namespace

Task gpu_nccl(Comm& comm, Call& call) {
  const NcclContext context(comm);
  switch (call.kind) {
    case OpKind::kAllreduce:
      return allreduce(context, call);
    case OpKind::kBroadcast:
      return broadcast(context, call);
    case OpKind::kReducescatter:
      return reducescatter(context, call);
    case OpKind::kAllgather:
      return allgather(context, call);
    case OpKind::kReduce:
      return reduce(context, call);
    case OpKind::kGather:
    case OpKind::kScatter:
      return exchange_with_root(context, call);
    default:
      return alltoall(context, call);
  }
}

}  // namespace horoplug
