// The tensors of a batch on a GPU as one buffer: packed and unpacked in one launch each.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "collectives/collective.h"
#include "collectives/partition.h"
#include "device/cuda/runtime/batch.h"
#include "device/cuda/runtime/workspace.h"

namespace horoplug {

inline constexpr std::size_t kGpuAlignment = 16;
constexpr std::size_t aligned_on_gpu(std::size_t bytes) {
  return (bytes + kGpuAlignment - 1) / kGpuAlignment * kGpuAlignment;
}

inline std::byte* device_pointer(std::uint64_t address) {
  return std::bit_cast<std::byte*>(address);
}

// The positions of tensors in a buffer on a GPU, which need not exist as a whole: each tensor
// begins at a multiple of 16 bytes. Calls use(tensor, at) for each tensor at `at` bytes into the
// buffer.
template <typename Use>
void for_each_on_gpu(const Layout& layout, Use&& use) {
  std::size_t at = 0;
  layout.for_each_tensor([&](const Layout::Tensor& tensor) {
    use(tensor, at);
    at += aligned_on_gpu(tensor.bytes);
  });
}

// The end of the last tensor. A single tensor has the same size on ranks that do not pack it.
inline std::size_t bytes_on_gpu(const Layout& layout) {
  std::size_t bytes = 0;
  for_each_on_gpu(layout,
                  [&](const Layout::Tensor& tensor, std::size_t at) { bytes = at + tensor.bytes; });
  return bytes;
}

// The runs of tensors in a part of the buffer: use(run, at), at `at` bytes into the part.
template <typename Use>
void for_each_run_on_gpu(const Layout& layout, const Part& part, Use&& use) {
  const std::size_t end = part.begin + part.bytes;
  for_each_on_gpu(layout, [&](const Layout::Tensor& tensor, std::size_t begins) {
    const std::size_t from = std::max(part.begin, begins);
    const std::size_t to = std::min(end, begins + tensor.bytes);
    if (from < to) use(layout.run_of(tensor, from - begins, to - from), from - part.begin);
  });
}

// The padding between tensors takes part in reductions, and its values are never used.
class GpuBuffer {
 public:
  // In working memory, unless the batch is a single tensor that can be processed in place: then its
  // input is at from() and its output at to(). Otherwise from() equals to().
  GpuBuffer(cuda::Workspace& workspace, const Call& call);
  // At `memory`, which has room for bytes_on_gpu(*call.layout).
  GpuBuffer(cuda::Workspace& workspace, const Call& call, std::uint64_t memory);

  std::uint64_t from() const { return from_; }
  std::uint64_t to() const { return to_; }
  std::size_t bytes() const { return bytes_; }
  std::size_t elements() const { return bytes_ / dtype_size(call_.dtype); }

  // Packs the inputs into from(), times the prescale factor, as elements of the call's type.
  void pack() const;
  // Unpacks to() into the outputs, after `finish`. Elements that are cast are not rounded to 16
  // bits again.
  void unpack(const Finish& finish) const;
  // The same for data that was not reduced by the GPU: see Launcher::move_reduced(). Such data has
  // no 16-bit elements, so nothing is cast.
  void unpack_reduced(const Finish& finish) const;

  // Calls use(tensor, at) for each tensor, at `at` bytes into the buffer.
  template <typename Use>
  void for_each(Use&& use) const {
    for_each_on_gpu(*call_.layout, use);
  }

 private:
  std::vector<cuda::Transfer> to_outputs(bool all) const;

  cuda::Workspace& workspace_;
  const Call& call_;
  std::uint64_t from_ = 0, to_ = 0;
  std::size_t bytes_ = 0;
};

// Copies the inputs to outputs at other addresses, as the root of a broadcast does.
void pass_on_gpu(cuda::Workspace& workspace, const Call& call);

// Addresses as kernel arguments.
std::uint64_t gpu_address(const std::byte* memory);

}  // namespace horoplug
