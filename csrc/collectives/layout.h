// The tensors of a batch as one contiguous buffer that need not exist.
//
// Algorithms access byte ranges of it: pack() gathers a range from the inputs, and unpack()
// scatters one to the outputs. The copy into a fusion buffer is therefore the only copy, and goes
// directly to where the transport needs it. The buffer may hold the tensors in a wire format:
// packing encodes them and unpacking decodes them in the same pass.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/inline_vector.h"
#include "base/types.h"
#include "base/wire_format.h"
#include "collectives/partition.h"
#include "device/cpu/kernels.h"
#include "trace/batch_trace.h"

namespace horoplug {

// What encoding loses of a tensor, by element: `before` is added when it is packed (nullptr:
// zeros), and `after` is written. Each range is packed once then. Without `after`, neither happens.
struct EncodingError {
  const float* before = nullptr;
  float* after = nullptr;
};

class Layout {
 public:
  // `stored`: the type of the tensors' elements. `wire`: how the buffer holds them; nullptr: as
  // they are.
  Layout(DType stored, double prescale, const WireFormat* wire = nullptr)
      : stored_(stored), wire_(wire), prescale_(prescale) {}

  // Appends a tensor of `bytes` bytes of memory. `output` may equal `input`.
  void add(const void* input, void* output, std::size_t bytes, EncodingError error = {});
  // Appends a tensor without a contribution of this rank, which has joined: every element of the
  // buffer reads as `identity` (identity_element.h, without prescale factor), and the output is
  // dropped. `bytes`: in the buffer.
  void add_absent(std::uint64_t identity, std::size_t bytes);
  // Reports to the trace when each tensor is packed and unpacked.
  void set_trace(BatchTrace* trace) { trace_ = trace; }

  // The type of the buffer's elements, and of the tensors'.
  DType dtype() const { return wire_ != nullptr ? wire_->dtype : stored_; }
  DType stored() const { return stored_; }
  const WireFormat* wire() const { return wire_; }
  bool encodes() const { return wire_ != nullptr; }
  std::size_t bytes() const { return bytes_; }

  // Copies the range [begin, begin + bytes) of the inputs to `to`, times the prescale factor. The
  // range consists of whole elements or blocks. `to` may be the output itself, unless the layout
  // encodes.
  void pack(std::size_t begin, std::size_t bytes, std::byte* to) const;
  void unpack(std::size_t begin, std::size_t bytes, const std::byte* from) const;

  // A contiguous range of bytes within one tensor.
  struct Run {
    std::size_t begin;  // in the buffer
    std::size_t bytes;
    const std::byte* input;  // nullptr: must be packed, because it is scaled, encoded or absent
    std::byte* output;       // nullptr: must be unpacked, because it is encoded or dropped
  };
  // Calls use(run) for each run of a range, in order.
  template <typename Use>
  void for_each_run(std::size_t begin, std::size_t bytes, Use&& use) const;

  // The non-empty tensors and their positions.
  std::size_t tensors() const { return placed_.size(); }
  Part tensor(std::size_t index) const { return {placed_[index].begin, placed_[index].bytes}; }

  // One tensor, for callers that move it without pack() and unpack(), which require the CPU's
  // memory.
  struct Tensor {
    const std::byte* input;  // nullptr: absent, every element is `identity`, its first bytes
    std::byte* output;       // nullptr: absent
    std::uint64_t identity;
    std::size_t begin;  // `begin` and `bytes` count in the buffer
    std::size_t bytes;
    std::size_t elements;  // of the tensor; absent: of the buffer
    EncodingError error;
  };
  template <typename Use>
  void for_each_tensor(Use&& use) const {
    for (const PlacedTensor& placed : placed_) use(static_cast<const Tensor&>(placed));
  }
  // The run of a tensor that begins `at` bytes into it, likewise.
  Tensor run_of(const Tensor& tensor, std::size_t at, std::size_t bytes) const;
  // Appends a tensor, or a run of one, of a layout of the same kind.
  void add(const Tensor& tensor) { place(tensor); }
  double prescale() const { return prescale_; }

  // The tensors' memory, if input and output are the same single run without a factor; nullptr
  // otherwise.
  std::byte* in_place() const;
  // The outputs' memory, if it is a single run that can serve as the buffer; nullptr otherwise.
  std::byte* contiguous_output() const;

 private:
  struct PlacedTensor : Tensor {
    std::size_t tensor;  // number of tensors added before
  };
  template <typename Visit>
  void visit(std::size_t begin, std::size_t bytes, Visit&& visit) const;
  void place(Tensor tensor);
  void encode(const Tensor& run, std::byte* to) const;

  DType stored_;
  const WireFormat* wire_;
  double prescale_;
  std::size_t bytes_ = 0;
  std::size_t added_ = 0;  // all tensors, including empty ones
  BatchTrace* trace_ = nullptr;
  InlineVector<PlacedTensor> placed_;
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
  const bool in_reach = !encodes(), as_it_is = in_reach && prescale_ == 1.0;
  visit(
      begin, bytes,
      [&](const PlacedTensor& placed, std::size_t at, std::size_t there, std::size_t n) {
        use(Run{begin + there, n, as_it_is && placed.input != nullptr ? placed.input + at : nullptr,
                in_reach && placed.output != nullptr ? placed.output + at : nullptr});
      });
}

}  // namespace horoplug
