#include "collectives/layout.h"

#include <cmath>
#include <cstring>

namespace horoplug {
namespace {

// Results of this size are evicted from the caches before they are read.
constexpr std::size_t kStreamedBytes = 32 << 20;
// The number of elements that are scaled and encoded while they are in the L1 cache.
constexpr std::size_t kEncodedAtOnce = 1024;

}  // namespace

void Layout::place(Tensor tensor) {
  const std::size_t number = added_++;
  if (tensor.bytes == 0) return;
  tensor.begin = bytes_;
  placed_.push_back({tensor, number});
  bytes_ += tensor.bytes;
}

void Layout::add(const void* input, void* output, std::size_t bytes, EncodingError error) {
  const std::size_t elements = bytes / dtype_size(stored_);
  place({static_cast<const std::byte*>(input), static_cast<std::byte*>(output), 0, 0,
         encodes() ? wire_->bytes(elements) : bytes, elements, error});
}

void Layout::add_absent(std::uint64_t identity, std::size_t bytes) {
  place({nullptr, nullptr, identity, 0, bytes, bytes / dtype_size(dtype()), {}});
}

Layout::Tensor Layout::run_of(const Tensor& tensor, std::size_t at, std::size_t bytes) const {
  Tensor run = tensor;
  run.begin += at;
  run.bytes = bytes;
  std::size_t skipped = at;  // bytes of the tensor's memory
  if (encodes() && tensor.input != nullptr) {
    const std::size_t first = wire_->elements(at);
    run.elements = std::min(wire_->elements(bytes), tensor.elements - first);
    skipped = first * sizeof(float);
    if (run.error.before != nullptr) run.error.before += first;
    if (run.error.after != nullptr) run.error.after += first;
  } else {
    run.elements = bytes / dtype_size(dtype());
  }
  if (run.input != nullptr) run.input += skipped;
  if (run.output != nullptr) run.output += skipped;
  return run;
}

void Layout::encode(const Tensor& run, std::byte* to) const {
  const KernelTable& table = kernels();
  const WireKernels& wire = table.wire[index_of(*wire_)];
  const bool keeps = run.error.after != nullptr;
  if (prescale_ == 1.0 && !keeps) return wire.encode(to, run.input, run.elements);
  float values[kEncodedAtOnce], sent[kEncodedAtOnce];
  const Finish factor{.multiply = prescale_, .divide = 1.0};
  const std::size_t most = kEncodedAtOnce / wire_->block * wire_->block;
  for (std::size_t i = 0; i < run.elements; i += most) {
    const std::size_t some = std::min(most, run.elements - i);
    table.scale[static_cast<int>(stored_)](values, run.input + i * sizeof(float), some, factor);
    for (std::size_t k = 0; run.error.before != nullptr && k < some; ++k) {
      values[k] += run.error.before[i + k];
    }
    wire.encode(to + wire_->bytes(i), values, some);
    if (!keeps) continue;
    wire.decode(sent, to + wire_->bytes(i), some);
    for (std::size_t k = 0; k < some; ++k) {
      const float lost = values[k] - sent[k];
      run.error.after[i + k] = std::isfinite(lost) ? lost : 0.0F;
    }
  }
}

void Layout::pack(std::size_t begin, std::size_t bytes, std::byte* to) const {
  const auto& table = kernels();
  const std::size_t element = dtype_size(dtype());
  visit(begin, bytes,
        [&](const PlacedTensor& placed, std::size_t at, std::size_t there, std::size_t n) {
          if (placed.input == nullptr) {
            for (std::size_t i = 0; i < n; i += element) {
              std::memset(to + there + i, 0, element);
              std::memcpy(to + there + i, &placed.identity,
                          std::min(element, sizeof placed.identity));
            }
            return;
          }
          if (encodes()) {
            const CopyTimer timer(trace_, BatchTrace::Copy::kIn, placed.tensor);
            return encode(run_of(placed, at, n), to + there);
          }
          const bool in_place = prescale_ == 1.0 && to + there == placed.input + at;
          const CopyTimer timer(in_place ? nullptr : trace_, BatchTrace::Copy::kIn, placed.tensor);
          if (prescale_ != 1.0) {
            const Finish factor{.multiply = prescale_, .divide = 1.0};
            table.scale[static_cast<int>(stored_)](to + there, placed.input + at, n / element,
                                                   factor);
          } else if (!in_place) {
            table.copy(to + there, placed.input + at, n);
          }
        });
}

void Layout::unpack(std::size_t begin, std::size_t bytes, const std::byte* from) const {
  const auto& table = kernels();
  const bool large = bytes_ >= kStreamedBytes;
  visit(begin, bytes,
        [&](const PlacedTensor& placed, std::size_t at, std::size_t there, std::size_t n) {
          if (encodes()) {
            if (placed.output == nullptr) return;
            const CopyTimer timer(trace_, BatchTrace::Copy::kOut, placed.tensor);
            const Tensor run = run_of(placed, at, n);
            return table.wire[index_of(*wire_)].decode(run.output, from + there, run.elements);
          }
          if (placed.output != nullptr && placed.output + at != from + there) {
            const CopyTimer timer(trace_, BatchTrace::Copy::kOut, placed.tensor);
            // In place, the output has just been read into the cache as the input.
            const bool past_caches = large && placed.output != placed.input;
            (past_caches ? table.stream : table.copy)(placed.output + at, from + there, n);
          }
        });
}

std::byte* Layout::in_place() const {
  std::byte* const output = contiguous_output();
  return prescale_ == 1.0 && output != nullptr && placed_.front().input == output ? output
                                                                                  : nullptr;
}

std::byte* Layout::contiguous_output() const {
  return placed_.size() == 1 && !encodes() ? placed_.front().output : nullptr;
}

}  // namespace horoplug
