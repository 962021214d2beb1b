// Allreduce of GPU tensors over several hosts with the same number of ranks each, without NCCL
// between hosts. The GPUs of a host reduce by NCCL or CUDA IPC, each rank one slice. Every slice
// passes through pinned memory in chunks, and the ranks that hold it reduce it between the hosts,
// all slices concurrently, with the algorithms for CPU tensors. Finally the GPUs of a host share
// the slices. A host's link carries the data once, and each GPU's bus carries one slice.
// (For the scheme, see Mikami et al., "Massively distributed SGD: ImageNet/ResNet-50 training in a
// flash", 2018.)
//
// A buffer is processed in windows, each as large as all slices together. Slices have equal
// lengths, so the end of the last one is padded. While the CPU works on a window, the GPUs reduce
// the next one and copy it to the CPU. A window's outputs are written in the last step only, from
// working memory.
#include <array>
#include <optional>
#include <vector>

#include "collectives/gpu/gpu_group.h"
#include "collectives/gpu/pack.h"
#include "collectives/gpu/staged.h"
#include "collectives/partition.h"
#include "device/cuda/runtime/batch.h"

namespace horoplug {
namespace {

using Purpose = cuda::Workspace::Purpose;

constexpr std::size_t kSlice = 4 * kStagedChunk;

// The working memory of this rank's slice of a window. There are two, used alternately.
struct SliceMemory {
  std::uint64_t on_device = 0;
  std::byte* on_cpu = nullptr;
};

// A part of the buffer that the tensors form.
struct Window {
  Window(const Call& call, const Part& part, std::size_t ranks)
      : layout(call.layout->stored(), call.layout->prescale(), call.layout->wire()) {
    for_each_run_on_gpu(*call.layout, part,
                        [&](const Layout::Tensor& run, std::size_t) { layout.add(run); });
    const std::size_t bytes = bytes_on_gpu(layout), grain = ranks * kGpuAlignment;
    slice = bytes / ranks;
    if (bytes % grain == 0) return;
    const std::size_t end = aligned_on_gpu(bytes);
    slice = (end / grain + 1) * kGpuAlignment;
    layout.add_absent(0, slice * ranks - end);
  }

  std::size_t chunks() const { return chunk_count(slice, kStagedChunk); }
  Part chunk(std::size_t index) const { return chunk_of({0, slice}, index, kStagedChunk); }

  Layout layout;
  std::size_t slice;                    // bytes
  std::vector<cuda::EventPtr> fetched;  // by chunk
};

// The state that all steps share. All work is in the stream of the host's ranks. All memory is the
// set's, because that stream's own memory is used by the collectives among these ranks.
struct HierarchicalContext {
  HierarchicalContext(Comm& of, const Call& its)
      : comm(of),
        host(*of.local_comm()),
        call(its),
        workspace(host.gpu()->workspace()),
        memory(of.gpu()->workspace()),
        ranks(static_cast<std::size_t>(host.size())) {}

  // By the cheapest algorithm among the ranks of the host.
  Task run_in_host(Call part) const {
    part.receive_bytes = sizes;
    co_await choose_algorithm(host, part, nullptr).run(host, part);
  }

  Comm& comm;
  Comm& host;
  const Call& call;
  cuda::Workspace& workspace;
  cuda::Workspace& memory;
  const std::size_t ranks;
  std::vector<std::size_t> sizes;
  std::uint64_t whole = 0;  // memory for a window on the GPU
};

Task reduce_in_host(HierarchicalContext& t, Window& window, const SliceMemory& at) {
  Call part = t.call;
  part.kind = OpKind::kReducescatter;
  part.layout = &window.layout;
  part.finish = {};
  part.output = device_pointer(at.on_device);
  t.sizes.assign(t.ranks, window.slice);
  co_await t.run_in_host(part);
  for (std::size_t i = 0; i < window.chunks(); ++i) {
    const Part chunk = window.chunk(i);
    t.workspace.fetch(at.on_cpu + chunk.begin, at.on_device + chunk.begin, chunk.bytes);
    window.fetched.push_back(t.workspace.mark());
  }
}

Task reduce_between_hosts(const HierarchicalContext& t, const Window& window,
                          const SliceMemory& at) {
  for (std::size_t i = 0; i < window.chunks(); ++i) {
    const Part chunk = window.chunk(i);
    std::byte* const data = at.on_cpu + chunk.begin;
    co_await PassedByAll(t.host, window.fetched[i]);
    Layout layout(t.call.dtype, 1.0);
    layout.add(data, data, chunk.bytes);
    co_await run_on_cpu(*t.comm.cross_comm(), t.call, &layout);
    t.workspace.bring(at.on_device + chunk.begin, data, chunk.bytes);
  }
  t.workspace.order(t.workspace.back(), t.workspace.stream());
}

// The CPU has already finished the values.
Task share_in_host(HierarchicalContext& t, const Window& window, const SliceMemory& at) {
  Call part = t.call;
  part.kind = OpKind::kAllgather;
  part.layout = nullptr;
  part.input = device_pointer(at.on_device);
  part.output = device_pointer(t.whole);
  t.sizes.assign(t.ranks, window.slice);
  co_await t.run_in_host(part);
  std::vector<cuda::Transfer> outputs;
  for_each_on_gpu(window.layout, [&](const Layout::Tensor& tensor, std::size_t begins) {
    if (tensor.output == nullptr) return;
    outputs.push_back({t.whole + begins, gpu_address(tensor.output), tensor.elements});
  });
  t.workspace.launcher().move(t.call.dtype, window.layout.stored(), {}, outputs);
}

}  // namespace

Task gpu_hierarchical(Comm& comm, Call& call) {
  HierarchicalContext t(comm, call);
  GpuGroup& gpu = *comm.gpu();
  const Part all{0, bytes_on_gpu(*call.layout)};
  const std::size_t most = kSlice * t.ranks;
  const std::size_t count = chunk_count(all.bytes, most);
  // Padding may take one more alignment unit.
  const std::size_t room = aligned_on_gpu(std::min(most, all.bytes) / t.ranks) + 2 * kGpuAlignment;
  co_await gpu.pinned_memory_free();
  t.whole = t.memory.on_device(Purpose::kInput, t.ranks * room);
  const std::uint64_t slices = t.memory.on_device(Purpose::kOutput, 2 * room);
  std::byte* const on_cpu = t.memory.pinned(Purpose::kInput, 2 * room);
  const std::array<SliceMemory, 2> places = {SliceMemory{slices, on_cpu},
                                             {slices + room, on_cpu + room}};

  t.memory.order(t.memory.stream(), t.workspace.stream());
  std::array<std::optional<Window>, 2> windows;
  for (std::size_t i = 0; i <= count; ++i) {
    if (i < count) {
      windows[i % 2].emplace(call, chunk_of(all, i, most), t.ranks);
      co_await reduce_in_host(t, *windows[i % 2], places[i % 2]);
    }
    if (i == 0) continue;
    const std::size_t before = (i - 1) % 2;
    co_await reduce_between_hosts(t, *windows[before], places[before]);
    co_await share_in_host(t, *windows[before], places[before]);
  }
  gpu.keep_pinned_memory(t.workspace.mark_back());
  t.memory.order(t.workspace.stream(), t.memory.stream());
}

}  // namespace horoplug
