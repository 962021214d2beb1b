// The tensors of a batch as one contiguous buffer that need not exist.
//
// Algorithms access byte ranges of it: pack() gathers a range from the inputs, and unpack()
// scatters one to the outputs. The copy into a fusion buffer is therefore the only copy, and goes
// directly to where the transport needs it. The buffer may hold float32 tensors as 16-bit elements:
// packing rounds them and unpacking widens them in the same pass.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/types.h"
#include "collectives/partition.h"
#include "trace/batch_trace.h"

namespace horoplug {

class Layout {
 public:
  // `dtype`: the type of the buffer's elements. `stored`: the type of the tensors' elements, which
  // differs only if they are float32 and the buffer holds float16 or bfloat16.
  Layout(DType dtype, double prescale, DType stored)
      : dtype_(dtype), stored_(stored), prescale_(prescale) {}
  Layout(DType dtype, double prescale) : Layout(dtype, prescale, dtype) {}

  // Appends a tensor of `bytes` bytes in the buffer. `output` may equal `input`.
  void add(const void* input, void* output, std::size_t bytes);
  // Appends a tensor without a contribution of this rank, which has joined: every element reads as
  // `identity` (identity_element.h, without prescale factor), and the output is dropped.
  void add_absent(std::uint64_t identity, std::size_t bytes);
  // Reports to the trace when each tensor is packed and unpacked.
  void set_trace(BatchTrace* trace) { trace_ = trace; }

  DType dtype() const { return dtype_; }
  DType stored() const { return stored_; }
  bool casts() const { return stored_ != dtype_; }
  std::size_t bytes() const { return bytes_; }
  std::size_t elements() const { return bytes_ / dtype_size(dtype_); }

  // Copies the range [begin, begin + bytes) of the inputs to `to`, times the prescale factor. The
  // range consists of whole elements. `to` may be the output itself, unless the layout casts.
  void pack(std::size_t begin, std::size_t bytes, std::byte* to) const;
  void unpack(std::size_t begin, std::size_t bytes, const std::byte* from) const;

  // A contiguous range of bytes within one tensor.
  struct Run {
    std::size_t begin;  // in the buffer
    std::size_t bytes;
    const std::byte* input;  // nullptr: must be packed, because it is scaled, cast or absent
    std::byte* output;       // nullptr: must be unpacked, because it is cast or dropped
  };
  // Calls use(run) for each run of a range, in order.
  template <typename Use>
  void for_each_run(std::size_t begin, std::size_t bytes, Use&& use) const;

  // The non-empty tensors and their positions.
  std::size_t tensors() const { return placed_.size(); }
  Part tensor(std::size_t index) const { return {placed_[index].begin, placed_[index].bytes}; }

  // One tensor, for callers that move it without pack() and unpack(), which require host memory.
  struct Tensor {
    const std::byte* input;  // nullptr: absent, every element is `identity`
    std::byte* output;       // nullptr: absent
    std::uint64_t identity;
    std::size_t begin;  // `begin` and `bytes` count in the buffer
    std::size_t bytes;
  };
  template <typename Use>
  void for_each_tensor(Use&& use) const {
    for (const PlacedTensor& p : placed_)
      use(Tensor{p.input, p.output, p.identity, p.begin, p.bytes});
  }
  // The run of a tensor that begins `at` bytes into it, likewise.
  Tensor run_of(const Tensor& tensor, std::size_t at, std::size_t bytes) const;
  double prescale() const { return prescale_; }

  // The tensors' memory, if input and output are the same single run without a factor; nullptr
  // otherwise.
  std::byte* in_place() const;
  // The outputs' memory, if it is a single run that can serve as the buffer; nullptr otherwise.
  std::byte* contiguous_output() const;

 private:
  struct PlacedTensor {
    const std::byte* input;  // nullptr: absent
    std::byte* output;
    std::uint64_t identity;  // its first bytes are the element
    std::size_t begin;
    std::size_t bytes;
    std::size_t tensor;  // number of tensors added before
  };
  template <typename Visit>
  void visit(std::size_t begin, std::size_t bytes, Visit&& visit) const;
  void pack_cast(const std::byte* from, std::size_t bytes, std::byte* to) const;

  DType dtype_, stored_;
  double prescale_;
  std::size_t bytes_ = 0;
  std::size_t added_ = 0;  // all tensors, including empty ones
  BatchTrace* trace_ = nullptr;
  std::vector<PlacedTensor> placed_;
};

template <typename Visit>
void Layout::visit(std::size_t begin, std::size_t bytes, Visit&& visit) const {
  auto placed =
      std::upper_bound(placed_.begin(), placed_.end(), begin,
                       [](std::size_t at, const PlacedTensor& p) { return at < p.begin; });
  if (placed != placed_.begin()) --placed;
  const std::size_t end = begin + bytes;
  for (; placed != placed_.end() && placed->begin < end; ++placed) {
    const std::size_t from = std::max(begin, placed->begin);
    const std::size_t to = std::min(end, placed->begin + placed->bytes);
    if (from < to) visit(*placed, from - placed->begin, from - begin, to - from);
  }
}

template <typename Use>
void Layout::for_each_run(std::size_t begin, std::size_t bytes, Use&& use) const {
  const bool in_reach = !casts(), as_it_is = in_reach && prescale_ == 1.0;
  visit(
      begin, bytes,
      [&](const PlacedTensor& placed, std::size_t at, std::size_t there, std::size_t n) {
        use(Run{begin + there, n, as_it_is && placed.input != nullptr ? placed.input + at : nullptr,
                in_reach && placed.output != nullptr ? placed.output + at : nullptr});
      });
}

}  // namespace horoplug
