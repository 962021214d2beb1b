// The tensors of a batch on a GPU as one buffer: packed and unpacked in one launch each.
#pragma once

#include <cstddef>
#include <cstdint>

#include "collectives/collective.h"
#include "device/cuda/workspace.h"

namespace horoplug {

// Where tensors lie in a buffer on a card, also in one that is never there as a whole: each at a
// multiple of 16 bytes. Calls use(tensor, at) for each tensor, which lies `at` bytes into it.
template <typename Use>
void for_each_on_gpu(const Layout& layout, Use&& use) {
  constexpr std::size_t kAlignment = 16;
  std::size_t at = 0;
  layout.for_each_tensor([&](const Layout::Tensor& tensor) {
    use(tensor, at);
    at += (tensor.bytes + kAlignment - 1) / kAlignment * kAlignment;
  });
}

// The memory between tensors takes part in what happens to the buffer, and nobody looks at it.
class GpuBuffer {
 public:
  // In working memory, unless the batch is one tensor that can be worked on where it is: its input
  // is at from() then, and its output at to(). Otherwise these are the same place.
  GpuBuffer(cuda::Workspace& workspace, const Call& call);

  std::uint64_t from() const { return from_; }
  std::uint64_t to() const { return to_; }
  std::size_t bytes() const { return bytes_; }
  std::size_t elements() const { return bytes_ / dtype_size(call_.dtype); }

  // Brings the inputs to from(), times the prescale factor.
  void pack() const;
  // Brings what is at to() to the outputs, finished by `finish`.
  void unpack(const Finish& finish) const;
  // Brings the inputs to the outputs.
  void pass() const;

  // Calls use(tensor, at) for each tensor, which lies `at` bytes into the buffer.
  template <typename Use>
  void for_each(Use&& use) const {
    for_each_on_gpu(*call_.layout, use);
  }

 private:
  cuda::Workspace& workspace_;
  const Call& call_;
  std::uint64_t from_ = 0, to_ = 0;
  std::size_t bytes_ = 0;
};

// Addresses as kernels take them.
std::uint64_t gpu_address(const std::byte* memory);

}  // namespace horoplug
