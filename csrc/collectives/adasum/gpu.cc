// Adasum of GPU tensors by recursive doubling; for the arithmetic, see adasum.h (Maleki et al.,
// 2021). At distance d a
// rank exchanges whole vectors with rank ^ d. Each vector represents d ranks, and both ranks
// compute the same combination. Vectors and dot products stay on the GPU.
//
// A kernel adds a tensor's dot products in an order that depends only on the tensor: all ranks get
// the same bits, alone and fused, over NCCL and CUDA IPC. They may differ from the CPU's.
#include <vector>

#include "collectives/adasum/adasum.h"
#include "collectives/gpu/gpu_group.h"
#include "collectives/gpu/pack.h"
#include "collectives/partition.h"

namespace horoplug {
namespace {

using cuda::Dots;
using cuda::Transfer;

// Exchanges the same number of bytes with the peer, on the GPU.
struct Swap {
  int peer;
  std::uint64_t from, to;
  std::size_t bytes;
};

Task by_nccl(Comm& comm, Swap swap) {
  cuda::NcclCommunicator& nccl = *comm.gpu()->nccl();
  const CUstream stream = comm.gpu()->workspace().stream().handle();
  nccl.begin();
  nccl.send(swap.from, swap.bytes, swap.peer, stream);
  nccl.receive(swap.to, swap.bytes, swap.peer, stream);
  nccl.end();
  co_await Settled(comm, nccl);
}

// In rounds limited by the size of a half.
Task by_ipc(Comm& comm, Swap swap) {
  cuda::Workspace& workspace = comm.gpu()->workspace();
  cuda::IpcPeers& peers = *comm.gpu()->ipc();
  const std::size_t half = peers.half_bytes();
  for (std::size_t i = 0; i < chunk_count(swap.bytes, half); ++i) {
    const Part part = chunk_of({0, swap.bytes}, i, half);
    workspace.copy(peers.own_half(), swap.from + part.begin, part.bytes);
    peers.barrier(workspace.stream().handle());
    workspace.copy(swap.to + part.begin, peers.half(swap.peer), part.bytes);
    peers.end_round();
  }
  co_return;
}

// The non-empty tensors at their positions in the vectors: from elements of type `from` to elements
// of type `to` at this address.
std::vector<Transfer> tensors_of(const GpuBuffer& buffer, DType dtype, DType from, DType to,
                                 std::uint64_t address) {
  std::vector<Transfer> tensors;
  const std::size_t element = dtype_size(dtype);
  buffer.for_each([&](const Layout::Tensor& tensor, std::size_t at) {
    if (tensor.bytes == 0) return;
    tensors.push_back({at / element * dtype_size(from), address + at / element * dtype_size(to),
                       tensor.bytes / element});
  });
  return tensors;
}

template <typename Exchange>
Task adasum(Comm& comm, Call& call, Exchange exchange) {
  cuda::Workspace& workspace = comm.gpu()->workspace();
  cuda::Launcher& launcher = workspace.launcher();
  const GpuBuffer buffer(workspace, call);
  if (buffer.bytes() == 0) co_return;
  buffer.pack();

  // The vector received from the peer, the combined vector, and their dot products.
  const DType wide = adasum_dtype(call.dtype);
  const std::size_t vector = (buffer.elements() * dtype_size(wide) + 15) / 16 * 16;
  const std::uint64_t theirs = workspace.on_device(
      cuda::Workspace::Purpose::kOutput, 2 * vector + call.layout->tensors() * sizeof(Dots));
  const std::uint64_t combined = theirs + vector, dots = combined + vector;

  std::uint64_t ours = buffer.from();
  DType dtype = call.dtype;
  for (int distance = 1; distance < comm.size(); distance *= 2) {
    const int peer = comm.rank() ^ distance;
    co_await exchange(comm, Swap{peer, ours, theirs, buffer.elements() * dtype_size(dtype)});
    // The peer has the operands in reverse order, which changes no bit.
    const std::vector<Transfer> tensors = tensors_of(buffer, call.dtype, dtype, wide, combined);
    launcher.dots(dtype, ours, theirs, tensors, dots);
    launcher.blend(dtype, ours, theirs, tensors, dots);
    ours = combined;
    dtype = wide;
  }

  std::vector<Transfer> outputs;
  buffer.for_each([&](const Layout::Tensor& tensor, std::size_t at) {
    const std::size_t element = dtype_size(call.dtype);
    if (tensor.output == nullptr) return;
    outputs.push_back({ours + at / element * dtype_size(wide), gpu_address(tensor.output),
                       tensor.bytes / element});
  });
  launcher.move(wide, call.layout->stored(), call.finish, outputs);
}

}  // namespace

Task gpu_adasum_nccl(Comm& comm, Call& call) { return adasum(comm, call, by_nccl); }
Task gpu_adasum_ipc(Comm& comm, Call& call) { return adasum(comm, call, by_ipc); }

}  // namespace horoplug
