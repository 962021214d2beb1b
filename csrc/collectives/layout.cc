#include "collectives/layout.h"

#include <algorithm>
#include <cstring>

#include "device/cpu/kernels.h"

namespace horoplug {
namespace {

// Results of this size are evicted from the caches before they are read.
constexpr std::size_t kStreamedBytes = 32 << 20;
// The number of elements that are scaled and then cast while they are in the L1 cache.
constexpr std::size_t kScaledAtOnce = 1024;

// The size of a buffer of 16-bit elements as float32.
constexpr std::size_t widened(std::size_t bytes) { return 2 * bytes; }

}  // namespace

void Layout::add(const void* input, void* output, std::size_t bytes) {
  const std::size_t tensor = added_++;
  if (bytes == 0) return;
  placed_.push_back({static_cast<const std::byte*>(input), static_cast<std::byte*>(output), 0,
                     bytes_, bytes, tensor});
  bytes_ += bytes;
}

void Layout::add_absent(std::uint64_t identity, std::size_t bytes) {
  const std::size_t tensor = added_++;
  if (bytes == 0) return;
  placed_.push_back({nullptr, nullptr, identity, bytes_, bytes, tensor});
  bytes_ += bytes;
}

Layout::Tensor Layout::run_of(const Tensor& tensor, std::size_t at, std::size_t bytes) const {
  const std::size_t skipped = casts() ? widened(at) : at;
  const auto past = [skipped](auto* memory) {
    return memory == nullptr ? memory : memory + skipped;
  };
  return {past(tensor.input), past(tensor.output), tensor.identity, tensor.begin + at, bytes};
}

void Layout::pack_cast(const std::byte* from, std::size_t bytes, std::byte* to) const {
  const auto& table = kernels();
  const ConvertFn narrow = table.narrow_to(dtype_);
  const std::size_t count = bytes / dtype_size(dtype_);
  if (prescale_ == 1.0) return narrow(to, from, count);
  float scaled[kScaledAtOnce];
  const Finish factor{.multiply = prescale_, .divide = 1.0};
  for (std::size_t i = 0; i < count; i += kScaledAtOnce) {
    const std::size_t some = std::min(kScaledAtOnce, count - i);
    table.scale[static_cast<int>(stored_)](scaled, from + i * sizeof(float), some, factor);
    narrow(to + i * dtype_size(dtype_), scaled, some);
  }
}

void Layout::pack(std::size_t begin, std::size_t bytes, std::byte* to) const {
  const auto& table = kernels();
  const std::size_t element = dtype_size(dtype_);
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
          if (casts()) {
            const CopyTimer timer(trace_, BatchTrace::Copy::kIn, placed.tensor);
            return pack_cast(placed.input + widened(at), n, to + there);
          }
          const bool in_place = prescale_ == 1.0 && to + there == placed.input + at;
          const CopyTimer timer(in_place ? nullptr : trace_, BatchTrace::Copy::kIn, placed.tensor);
          if (prescale_ != 1.0) {
            const Finish factor{.multiply = prescale_, .divide = 1.0};
            table.scale[static_cast<int>(dtype_)](to + there, placed.input + at, n / element,
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
          if (casts()) {
            if (placed.output == nullptr) return;
            const CopyTimer timer(trace_, BatchTrace::Copy::kOut, placed.tensor);
            const ConvertFn widen = table.widen_from(dtype_);
            return widen(placed.output + widened(at), from + there, n / dtype_size(dtype_));
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
  return placed_.size() == 1 && !casts() ? placed_.front().output : nullptr;
}

}  // namespace horoplug
