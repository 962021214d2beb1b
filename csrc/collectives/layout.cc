#include "collectives/layout.h"

#include <algorithm>
#include <cstring>

#include "device/cpu/kernels.h"

namespace horoplug {
namespace {

// Results of this size leave the caches before anybody reads them.
constexpr std::size_t kStreamedBytes = 32 << 20;

}  // namespace

void Layout::add(const void* input, void* output, std::size_t bytes) {
  const std::size_t tensor = added_++;
  if (bytes == 0) return;
  pieces_.push_back({static_cast<const std::byte*>(input), static_cast<std::byte*>(output), 0,
                     bytes_, bytes, tensor});
  bytes_ += bytes;
}

void Layout::add_absent(std::uint64_t neutral, std::size_t bytes) {
  const std::size_t tensor = added_++;
  if (bytes == 0) return;
  pieces_.push_back({nullptr, nullptr, neutral, bytes_, bytes, tensor});
  bytes_ += bytes;
}

void Layout::pack(std::size_t begin, std::size_t bytes, std::byte* to) const {
  const auto& table = kernels();
  const std::size_t element = dtype_size(dtype_);
  visit(begin, bytes, [&](const Piece& piece, std::size_t at, std::size_t there, std::size_t n) {
    if (piece.input == nullptr) {
      for (std::size_t i = 0; i < n; i += element) {
        std::memcpy(to + there + i, &piece.neutral, element);
      }
      return;
    }
    const bool in_place = prescale_ == 1.0 && to + there == piece.input + at;
    const CopyTimer timer(in_place ? nullptr : trace_, BatchTrace::Copy::kIn, piece.tensor);
    if (prescale_ != 1.0) {
      const Finish factor{.multiply = prescale_, .divide = 1.0};
      table.scale[static_cast<int>(dtype_)](to + there, piece.input + at, n / element, factor);
    } else if (!in_place) {
      table.copy(to + there, piece.input + at, n);
    }
  });
}

void Layout::unpack(std::size_t begin, std::size_t bytes, const std::byte* from) const {
  const bool large = bytes_ >= kStreamedBytes;
  visit(begin, bytes, [&](const Piece& piece, std::size_t at, std::size_t there, std::size_t n) {
    if (piece.output != nullptr && piece.output + at != from + there) {
      const CopyTimer timer(trace_, BatchTrace::Copy::kOut, piece.tensor);
      // In place, the output has just been in the cache as the input.
      const bool past_caches = large && piece.output != piece.input;
      (past_caches ? kernels().stream : kernels().copy)(piece.output + at, from + there, n);
    }
  });
}

std::byte* Layout::in_place() const {
  std::byte* const output = contiguous_output();
  return prescale_ == 1.0 && output != nullptr && pieces_.front().input == output ? output
                                                                                  : nullptr;
}

std::byte* Layout::contiguous_output() const {
  return pieces_.size() == 1 ? pieces_.front().output : nullptr;
}

}  // namespace horoplug
