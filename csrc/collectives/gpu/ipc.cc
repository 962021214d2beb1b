// GPU tensors of the ranks of one host by CUDA IPC: each rank's kernels read the other ranks'
// fusion buffers.
//
// A batch is processed in rounds (see IpcPeers), each limited by the size of a half. In a round a
// rank packs its part into its own half, its stream passes a barrier of all ranks' streams, and it
// reads what it needs from their halves. An allreduce of little data takes one step: every rank
// reduces all of it, directly into its outputs. For more data, each rank reduces a slice into its
// own half, where no other rank accesses that slice; a second barrier follows, and every rank
// collects all slices. Reductions combine operands in rank order, so all ranks get the same bits,
// which are also those of the CPU's algorithms.
//
// All work is enqueued at once and cannot be withdrawn: in a plan, ranks run a barrier first
// (Algorithm::defers_writes), and all ranks count rounds identically.
#include <algorithm>
#include <vector>

#include "collectives/allgather_fixed.h"
#include "collectives/gpu/gpu_group.h"
#include "collectives/gpu/pack.h"
#include "collectives/partition.h"
#include "device/cuda/runtime/batch.h"
#include "device/cuda/runtime/ipc_peers.h"

namespace horoplug {
namespace {

using cuda::Transfer;
using Transfers = std::vector<Transfer>;

// The state that all steps share.
struct IpcContext {
  IpcContext(Comm& of, const Call& its)
      : comm(of),
        call(its),
        workspace(of.gpu()->workspace()),
        peers(*of.gpu()->ipc()),
        rank(of.rank()),
        size(of.size()),
        grain(its.grain()),
        segment(peers.half_bytes() / static_cast<std::size_t>(size) / kGpuAlignment *
                kGpuAlignment) {}

  void move(const Transfers& transfers) const {
    workspace.launcher().move(call.dtype, call.dtype, {}, transfers);
  }
  // Copies from and to the layout's tensors.
  void pack(const Transfers& inputs) const {
    const Layout& layout = *call.layout;
    workspace.launcher().move(layout.stored(), call.dtype, {.multiply = layout.prescale()}, inputs);
  }
  void unpack(const Transfers& outputs) const {
    workspace.launcher().move(call.dtype, call.layout->stored(), {}, outputs);
  }
  // Reduces the data of all ranks at the transfers' positions, `at` bytes into each half.
  void reduce(std::size_t at, const Transfers& transfers) const {
    std::vector<std::uint64_t> sources;
    for (int r = 0; r < size; ++r) sources.push_back(peers.half(r) + at);
    workspace.launcher().reduce(call.reduce_op, call.dtype, call.finish, sources, transfers);
  }
  void barrier() const { peers.barrier(workspace.stream().handle()); }

  // A half as one segment for each rank.
  std::size_t at_segment(int of) const { return static_cast<std::size_t>(of) * segment; }

  Comm& comm;
  const Call& call;
  cuda::Workspace& workspace;
  cuda::IpcPeers& peers;
  const int rank, size;
  const std::size_t grain, segment;
};

// A part of the buffer that the tensors form, without the padding before the next tensor.
Part all_of(const Call& call) { return {0, aligned_on_gpu(bytes_on_gpu(*call.layout))}; }

// Appends the transfers that pack a part of the buffer.
void add_inputs(const IpcContext& t, const Part& part, std::uint64_t to, Transfers& inputs) {
  for_each_run_on_gpu(*t.call.layout, part, [&](const Layout::Tensor& run, std::size_t at) {
    if (run.input == nullptr) {
      inputs.push_back({run.identity, to + at, run.elements, true});
    } else {
      inputs.push_back({gpu_address(run.input), to + at, run.elements});
    }
  });
}

void pack(const IpcContext& t, const Part& part) {
  Transfers inputs;
  add_inputs(t, part, t.peers.own_half(), inputs);
  t.pack(inputs);
}

// Transfers that copy a part of the buffer from `from` to the outputs.
Transfers outputs_of(const IpcContext& t, const Part& part, std::uint64_t from) {
  Transfers outputs;
  for_each_run_on_gpu(*t.call.layout, part, [&](const Layout::Tensor& run, std::size_t at) {
    if (run.output == nullptr) return;
    outputs.push_back({from + at, gpu_address(run.output), run.elements});
  });
  return outputs;
}

// Whether every rank reduces all of it, which saves one barrier and moves more bytes.
bool in_one_step(const IpcContext& t, std::size_t bytes) {
  const LinkCosts& peers = t.comm.costs().ipc;
  const double others = t.size - 1;
  const double more = others * static_cast<double>(bytes) * (1 - 2.0 / t.size);
  return more * peers.byte <= peers.latency;
}

// Reduces all ranks' packed data of a part, directly into the outputs if these have its type.
void reduce_to_outputs(const IpcContext& t, const Part& part) {
  if (!t.call.layout->encodes()) return t.reduce(0, outputs_of(t, part, 0));
  const std::uint64_t results =
      t.workspace.on_device(cuda::Workspace::Purpose::kOutput, part.bytes);
  t.reduce(0, {{0, results, part.bytes / t.grain}});
  t.unpack(outputs_of(t, part, results));
}

Task allreduce(const IpcContext& t) {
  const Part all = all_of(t.call);
  const std::size_t half = t.peers.half_bytes();
  for (std::size_t i = 0; i < chunk_count(all.bytes, half); ++i) {
    const Part part = chunk_of(all, i, half);
    pack(t, part);
    t.barrier();
    if (in_one_step(t, part.bytes)) {
      reduce_to_outputs(t, part);
    } else {
      const std::vector<Part> slices = split_evenly(part.bytes, t.size, kGpuAlignment);
      const Part& own = slices[static_cast<std::size_t>(t.rank)];
      t.reduce(0, {{own.begin, t.peers.own_half() + own.begin, own.bytes / t.grain}});
      t.barrier();
      Transfers outputs;
      for (int r = 0; r < t.size; ++r) {
        const Part& slice = slices[static_cast<std::size_t>(r)];
        const Transfers some =
            outputs_of(t, {part.begin + slice.begin, slice.bytes}, t.peers.half(r) + slice.begin);
        outputs.insert(outputs.end(), some.begin(), some.end());
      }
      t.unpack(outputs);
    }
    t.peers.end_round();
  }
  co_return;
}

Task broadcast(const IpcContext& t) {
  const Part all = all_of(t.call);
  const std::size_t half = t.peers.half_bytes();
  const bool is_root = t.call.root == t.rank;
  for (std::size_t i = 0; i < chunk_count(all.bytes, half); ++i) {
    const Part part = chunk_of(all, i, half);
    if (is_root) pack(t, part);
    t.barrier();
    if (!is_root) t.unpack(outputs_of(t, part, t.peers.half(t.call.root)));
    t.peers.end_round();
  }
  if (is_root) pass_on_gpu(t.workspace, t.call);
  co_return;
}

// A round processes as much of each rank's part as a segment holds.
Task reducescatter(const IpcContext& t) {
  const std::vector<Part> parts = consecutive(t.call.receive_bytes);
  const std::size_t most = std::ranges::max(t.call.receive_bytes);
  for (std::size_t i = 0; i < chunk_count(most, t.segment); ++i) {
    Transfers inputs;
    for (int r = 0; r < t.size; ++r) {
      add_inputs(t, chunk_of(parts[static_cast<std::size_t>(r)], i, t.segment),
                 t.peers.own_half() + t.at_segment(r), inputs);
    }
    t.pack(inputs);
    t.barrier();
    const Part& part = parts[static_cast<std::size_t>(t.rank)];
    const Part own = chunk_of({0, part.bytes}, i, t.segment);
    t.reduce(t.at_segment(t.rank),
             {{0, gpu_address(t.call.output) + own.begin, own.bytes / t.grain}});
    t.peers.end_round();
  }
  co_return;
}

Task allgather(const IpcContext& t) {
  const std::vector<Part> parts = consecutive(t.call.receive_bytes);
  const std::size_t half = t.peers.half_bytes();
  const std::size_t most = std::ranges::max(t.call.receive_bytes);
  const std::uint64_t input = gpu_address(t.call.input), output = gpu_address(t.call.output);
  for (std::size_t i = 0; i < chunk_count(most, half); ++i) {
    Transfers results;
    for (int r = 0; r < t.size; ++r) {
      const Part& part = parts[static_cast<std::size_t>(r)];
      const Part chunk = chunk_of({0, part.bytes}, i, half);
      const bool own = r == t.rank;
      if (own) t.move({{input + chunk.begin, t.peers.own_half(), chunk.bytes / t.grain}});
      results.push_back({own ? input + chunk.begin : t.peers.half(r),
                         output + part.begin + chunk.begin, chunk.bytes / t.grain});
    }
    t.barrier();
    t.move(results);
    t.peers.end_round();
  }
  co_return;
}

// A rank knows only its own sizes, so the ranks exchange the number of rounds.
Task alltoall(const IpcContext& t) {
  const std::vector<Part> sent = consecutive(t.call.send_bytes);
  const std::vector<Part> received = consecutive(t.call.receive_bytes);
  const std::uint64_t input = gpu_address(t.call.input), output = gpu_address(t.call.output);
  const std::size_t largest = std::ranges::max(t.call.send_bytes);
  std::vector<std::size_t> all_largest;
  co_await allgather_fixed(t.comm, largest, all_largest);
  const std::size_t most = std::ranges::max(all_largest);
  for (std::size_t i = 0; i < chunk_count(most, t.segment); ++i) {
    Transfers inputs, results;
    for (int r = 0; r < t.size; ++r) {
      const Part out = chunk_of(sent[static_cast<std::size_t>(r)], i, t.segment);
      const Part in = chunk_of(received[static_cast<std::size_t>(r)], i, t.segment);
      const bool own = r == t.rank;
      if (!own) {
        inputs.push_back(
            {input + out.begin, t.peers.own_half() + t.at_segment(r), out.bytes / t.grain});
      }
      results.push_back({own ? input + out.begin : t.peers.half(r) + t.at_segment(t.rank),
                         output + in.begin, in.bytes / t.grain});
    }
    t.move(inputs);
    t.barrier();
    t.move(results);
    t.peers.end_round();
  }
}

}  // namespace

Task gpu_ipc(Comm& comm, Call& call) {
  const IpcContext context(comm, call);
  switch (call.kind) {
    case OpKind::kAllreduce:
      co_await allreduce(context);
      break;
    case OpKind::kBroadcast:
      co_await broadcast(context);
      break;
    case OpKind::kReducescatter:
      co_await reducescatter(context);
      break;
    case OpKind::kAllgather:
      co_await allgather(context);
      break;
    default:
      co_await alltoall(context);
  }
}

}  // namespace horoplug
