#include "collectives/gpu_pack.h"

#include <bit>
#include <vector>

#include "device/cuda/batch.h"

namespace horoplug {

using cuda::Transfer;
using Transfers = std::vector<Transfer>;

std::uint64_t gpu_address(const std::byte* memory) { return std::bit_cast<std::uint64_t>(memory); }

GpuBuffer::GpuBuffer(cuda::Workspace& workspace, const Call& call)
    : workspace_(workspace), call_(call) {
  // The end of the last one: a single tensor is as large on ranks where it stays in its place.
  for_each([this](const Layout::Tensor& tensor, std::size_t at) { bytes_ = at + tensor.bytes; });
  if (call.layout->tensors() == 1 && call.layout->prescale() == 1.0) {
    for_each([this](const Layout::Tensor& tensor, std::size_t) {
      from_ = gpu_address(tensor.input);
      to_ = tensor.output != nullptr ? gpu_address(tensor.output) : from_;
    });
  }
  if (from_ == 0) {
    from_ = to_ = workspace.on_card(cuda::Workspace::Purpose::kInput, bytes_);
  }
}

void GpuBuffer::pack() const {
  const std::size_t element = dtype_size(call_.dtype);
  Transfers inputs;
  for_each([&](const Layout::Tensor& tensor, std::size_t at) {
    const std::uint64_t count = tensor.bytes / element;
    if (tensor.input == nullptr) {
      inputs.push_back({tensor.neutral, from_ + at, count, true});
    } else if (gpu_address(tensor.input) != from_ + at) {
      inputs.push_back({gpu_address(tensor.input), from_ + at, count});
    }
  });
  workspace_.launcher().move(call_.dtype, call_.dtype, {.multiply = call_.layout->prescale()},
                             inputs);
}

void GpuBuffer::unpack(const Finish& finish) const {
  const std::size_t element = dtype_size(call_.dtype);
  Transfers outputs;
  for_each([&](const Layout::Tensor& tensor, std::size_t at) {
    const bool there = gpu_address(tensor.output) == to_ + at && finish.is_identity();
    if (tensor.output == nullptr || there) return;
    outputs.push_back({to_ + at, gpu_address(tensor.output), tensor.bytes / element});
  });
  workspace_.launcher().move(call_.dtype, call_.dtype, finish, outputs);
}

void GpuBuffer::pass() const {
  const std::size_t element = dtype_size(call_.dtype);
  Transfers tensors;
  for_each([&](const Layout::Tensor& tensor, std::size_t) {
    if (tensor.output == nullptr || tensor.output == tensor.input) return;
    tensors.push_back(
        {gpu_address(tensor.input), gpu_address(tensor.output), tensor.bytes / element});
  });
  workspace_.launcher().move(call_.dtype, call_.dtype, {}, tensors);
}

}  // namespace horoplug
