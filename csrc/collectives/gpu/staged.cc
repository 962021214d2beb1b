// GPU tensors through the CPU's memory: the algorithms for CPU tensors do the work over whatever
// connects the ranks, without NCCL.
//
// A buffer is processed in chunks: while the CPU reduces one chunk, the next ones are copied from
// the GPU and the previous one is copied back in a second stream. The CPU waits only for copies to
// it.
#include "collectives/gpu/staged.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "collectives/gpu/gpu_group.h"
#include "collectives/gpu/pack.h"
#include "collectives/partition.h"

namespace horoplug {
namespace {

using Purpose = cuda::Workspace::Purpose;

constexpr std::size_t kChunk = kStagedChunk;
// The amount of a buffer that is in the CPU's memory at a time.
constexpr std::size_t kWindow = 32 * kChunk;

// One window of a buffer; `host` has room for it.
Task run_window(Comm& comm, const Call& call, const GpuBuffer& buffer, const Part& window,
                std::size_t chunk_bytes, std::byte* host) {
  cuda::Workspace& workspace = comm.gpu()->workspace();
  const bool is_root = call.kind == OpKind::kBroadcast && call.root == comm.rank();
  const bool gets_result = call.kind == OpKind::kReduce ? call.root == comm.rank() : !is_root;
  const bool fetches = is_root || call.kind != OpKind::kBroadcast;
  const std::size_t chunks = chunk_count(window.bytes, chunk_bytes);
  std::vector<cuda::EventPtr> fetched;
  for (std::size_t i = 0; fetches && i < chunks; ++i) {
    const Part part = chunk_of(window, i, chunk_bytes);
    workspace.fetch(host + part.begin - window.begin, buffer.from() + part.begin, part.bytes);
    fetched.push_back(workspace.mark());
  }
  for (std::size_t i = 0; i < chunks; ++i) {
    const Part part = chunk_of(window, i, chunk_bytes);
    std::byte* const at = host + part.begin - window.begin;
    if (fetches) co_await Passed(fetched[i]);
    Layout layout(call.dtype, 1.0);
    if (part.bytes == buffer.bytes()) {
      // Adasum has to distinguish the tensors.
      buffer.for_each([&](const Layout::Tensor& tensor, std::size_t begin) {
        layout.add(at + begin, at + begin, tensor.bytes);
      });
    } else {
      layout.add(at, at, part.bytes);
    }
    co_await run_on_cpu(comm, call, &layout);
    if (gets_result) workspace.bring(buffer.to() + part.begin, at, part.bytes);
  }
}

// Allreduce, broadcast and reduce.
Task run_in_chunks(Comm& comm, const Call& call) {
  GpuGroup& gpu = *comm.gpu();
  cuda::Workspace& workspace = gpu.workspace();
  const GpuBuffer buffer(workspace, call);
  const bool is_root = call.kind == OpKind::kBroadcast && call.root == comm.rank();
  if (is_root || call.kind != OpKind::kBroadcast) buffer.pack();
  const bool gets_result = call.kind != OpKind::kReduce || call.root == comm.rank();
  // Copies back are ordered behind the framework's earlier work on the outputs.
  workspace.order(workspace.stream(), workspace.back());
  const bool whole = call.reduce_op == ReduceOp::kAdasum;
  const std::size_t size = whole ? buffer.bytes() : std::min(kWindow, buffer.bytes());
  std::byte* const host = workspace.pinned(Purpose::kInput, size);
  for (std::size_t i = 0; i < chunk_count(buffer.bytes(), size); ++i) {
    co_await gpu.pinned_memory_free();
    const Part window = chunk_of({0, buffer.bytes()}, i, size);
    co_await run_window(comm, call, buffer, window, whole ? size : kChunk, host);
    gpu.keep_pinned_memory(workspace.mark_back());
  }
  workspace.order(workspace.back(), workspace.stream());
  // The CPU has already finished the values.
  if (is_root) {
    pass_on_gpu(workspace, call);
  } else {
    if (gets_result) buffer.unpack({});
  }
}

// Allreduce in a wire format that GPUs do not have: the tensors' own elements come to the CPU.
Task run_encoded(Comm& comm, const Call& call) {
  GpuGroup& gpu = *comm.gpu();
  cuda::Workspace& workspace = gpu.workspace();
  workspace.order(workspace.stream(), workspace.back());
  std::size_t bytes = 0;
  std::vector<std::size_t> places;  // of the tensors, in the CPU's memory
  call.layout->for_each_tensor([&](const Layout::Tensor& tensor) {
    places.push_back(bytes);
    bytes += aligned_on_gpu(tensor.elements * sizeof(float));
  });
  co_await gpu.pinned_memory_free();
  std::byte* const host = workspace.pinned(Purpose::kInput, bytes);
  Layout layout(call.layout->stored(), call.layout->prescale(), call.wire);
  auto place = places.begin();
  call.layout->for_each_tensor([&](Layout::Tensor tensor) {
    std::byte* const at = host + *place++;
    if (tensor.input != nullptr) {
      workspace.fetch(at, gpu_address(tensor.input), tensor.elements * sizeof(float));
      tensor.input = tensor.output = at;
    }
    layout.add(tensor);
  });
  co_await Passed(workspace.mark());
  co_await run_on_cpu(comm, call, &layout);
  place = places.begin();
  call.layout->for_each_tensor([&](const Layout::Tensor& tensor) {
    const std::byte* const at = host + *place++;
    if (tensor.output == nullptr) return;
    workspace.bring(gpu_address(tensor.output), at, tensor.elements * sizeof(float));
  });
  gpu.keep_pinned_memory(workspace.mark_back());
  workspace.order(workspace.back(), workspace.stream());
}

// Reducescatter, allgather, alltoall, gather and scatter.
Task run_at_once(Comm& comm, const Call& call) {
  GpuGroup& gpu = *comm.gpu();
  cuda::Workspace& workspace = gpu.workspace();
  const auto sum = [](std::span<const std::size_t> sizes) {
    return std::accumulate(sizes.begin(), sizes.end(), std::size_t{0});
  };
  const std::size_t own = call.receive_bytes[static_cast<std::size_t>(comm.rank())];
  std::uint64_t from = gpu_address(call.input);
  const bool is_root = call.root == comm.rank();
  std::size_t input_bytes = call.kind == OpKind::kAllgather ? own : sum(call.send_bytes);
  std::size_t output_bytes = sum(call.receive_bytes);
  if (call.kind == OpKind::kGather) {
    input_bytes = own;
    if (!is_root) output_bytes = 0;
  } else if (call.kind == OpKind::kScatter) {
    input_bytes = is_root ? output_bytes : 0;
    output_bytes = own;
  }
  if (call.kind == OpKind::kReducescatter) {
    const GpuBuffer buffer(workspace, call);
    buffer.pack();
    from = buffer.from();
    input_bytes = buffer.bytes();
    output_bytes = own;
  }
  co_await gpu.pinned_memory_free();
  Call on_cpu = call;
  std::byte* const input = workspace.pinned(Purpose::kInput, input_bytes);
  on_cpu.input = input;
  on_cpu.output = workspace.pinned(Purpose::kOutput, output_bytes);
  workspace.fetch(input, from, input_bytes);
  co_await Passed(workspace.mark());
  Layout layout(call.dtype, 1.0);
  layout.add(input, nullptr, input_bytes);
  co_await run_on_cpu(comm, on_cpu, call.layout != nullptr ? &layout : nullptr);
  workspace.order(workspace.stream(), workspace.back());
  workspace.bring(gpu_address(call.output), on_cpu.output, output_bytes);
  gpu.keep_pinned_memory(workspace.mark_back());
  workspace.order(workspace.back(), workspace.stream());
}

}  // namespace

Task run_on_cpu(Comm& comm, Call call, Layout* layout) {
  call.on_gpu = false;
  call.layout = layout;
  co_await choose_algorithm(comm, call, nullptr).run(comm, call);
}

Task gpu_staged(Comm& comm, Call& call) {
  if (call.wire != nullptr && !call.wire->on_gpu) return run_encoded(comm, call);
  const bool in_chunks = operation_info(call.kind).fuses;
  return in_chunks ? run_in_chunks(comm, call) : run_at_once(comm, call);
}

}  // namespace horoplug
