#include "collectives/gpu/pack.h"

namespace horoplug {

using cuda::Transfer;
using Transfers = std::vector<Transfer>;

std::uint64_t gpu_address(const std::byte* memory) { return std::bit_cast<std::uint64_t>(memory); }

GpuBuffer::GpuBuffer(cuda::Workspace& workspace, const Call& call)
    : workspace_(workspace), call_(call), bytes_(bytes_on_gpu(*call.layout)) {
  if (call.layout->tensors() == 1 && call.layout->prescale() == 1.0 && !call.layout->encodes()) {
    for_each([this](const Layout::Tensor& tensor, std::size_t) {
      from_ = gpu_address(tensor.input);
      to_ = tensor.output != nullptr ? gpu_address(tensor.output) : from_;
    });
  }
  if (from_ == 0) {
    from_ = to_ = workspace.on_device(cuda::Workspace::Purpose::kInput, bytes_);
  }
}

GpuBuffer::GpuBuffer(cuda::Workspace& workspace, const Call& call, std::uint64_t memory)
    : workspace_(workspace),
      call_(call),
      from_(memory),
      to_(memory),
      bytes_(bytes_on_gpu(*call.layout)) {}

void GpuBuffer::pack() const {
  Transfers inputs;
  for_each([&](const Layout::Tensor& tensor, std::size_t at) {
    if (tensor.input == nullptr) {
      inputs.push_back({tensor.identity, from_ + at, tensor.elements, true});
    } else if (gpu_address(tensor.input) != from_ + at) {
      inputs.push_back({gpu_address(tensor.input), from_ + at, tensor.elements});
    }
  });
  workspace_.launcher().move(call_.layout->stored(), call_.dtype,
                             {.multiply = call_.layout->prescale()}, inputs);
}

Transfers GpuBuffer::to_outputs(bool all) const {
  Transfers outputs;
  for_each([&](const Layout::Tensor& tensor, std::size_t at) {
    const bool there = gpu_address(tensor.output) == to_ + at;
    if (tensor.output == nullptr || (there && !all)) return;
    outputs.push_back({to_ + at, gpu_address(tensor.output), tensor.elements});
  });
  return outputs;
}

void GpuBuffer::unpack(const Finish& finish) const {
  const Transfers outputs = to_outputs(!finish.is_identity());
  workspace_.launcher().move(call_.dtype, call_.layout->stored(), finish, outputs);
}

void GpuBuffer::unpack_reduced(const Finish& finish) const {
  workspace_.launcher().move_reduced(call_.dtype, finish, to_outputs(true));
}

void pass_on_gpu(cuda::Workspace& workspace, const Call& call) {
  Transfers tensors;
  for_each_on_gpu(*call.layout, [&](const Layout::Tensor& tensor, std::size_t) {
    if (tensor.output == nullptr || tensor.output == tensor.input) return;
    tensors.push_back({gpu_address(tensor.input), gpu_address(tensor.output), tensor.elements});
  });
  workspace.launcher().move(call.dtype, call.dtype, {}, tensors);
}

}  // namespace horoplug
