// The forms in which the elements of an allreduce can travel instead of as they are: a table with
// one row for each form.
//
// A format encodes a float32 tensor block by block, and the last block of a tensor may hold fewer
// elements. No buffer is cut within a block. Everything that depends on the format asks its row:
// submissions, signatures, layouts, algorithms, costs and GPUs. Its kernels are KernelTable::wire
// (device/cpu/kernels.h) and, for formats on GPUs, those of device/cuda/kernels/list.def.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>

#include "base/types.h"

namespace horoplug {

// The code of a format that is no dtype, and no part of the C ABI.
inline constexpr std::int32_t kInt8Blocks = 128;

struct WireFormat {
  const char* name;
  std::int32_t code;        // hp_submission::wire_dtype
  bool offered;             // whether messages name it to users
  DType dtype;              // of the elements of the encoded buffer
  std::size_t block;        // elements of the tensor that are encoded together
  std::size_t block_bytes;  // what they take
  // Whether the sums of some of the ranks may be encoded on their way to the sum of all. Otherwise
  // each element is summed at once, from the contributions of all ranks.
  bool partial_sums;
  // Error feedback: whether what encoding a tensor loses, the residual, is added to the tensor of
  // the same name when it is encoded next.
  bool keeps_error;
  bool on_gpu;  // whether there are GPU kernels; otherwise GPU tensors are encoded in the CPU's
                // memory

  constexpr std::size_t bytes(std::size_t elements) const {
    return (elements + block - 1) / block * block_bytes;
  }
  // The number of elements in `bytes` bytes of whole blocks, if the last one is full.
  constexpr std::size_t elements(std::size_t bytes) const { return bytes / block_bytes * block; }
};

inline constexpr WireFormat kWireFormats[] = {
    {.name = "float16",
     .code = HP_FLOAT16,
     .offered = true,
     .dtype = DType::kFloat16,
     .block = 1,
     .block_bytes = 2,
     .partial_sums = true,
     .keeps_error = false,
     .on_gpu = true},
    {.name = "bfloat16",
     .code = HP_BFLOAT16,
     .offered = true,
     .dtype = DType::kBFloat16,
     .block = 1,
     .block_bytes = 2,
     .partial_sums = true,
     .keeps_error = false,
     .on_gpu = true},
    // A float32 factor and what it multiplies: device/cpu/kernels_blocks.h.
    {.name = "int8",
     .code = kInt8Blocks,
     .offered = false,
     .dtype = DType::kInt8,
     .block = 60,
     .block_bytes = 64,
     .partial_sums = false,
     .keeps_error = true,
     .on_gpu = false},
};
inline constexpr int kWireFormatCount = static_cast<int>(std::size(kWireFormats));

constexpr int index_of(const WireFormat& format) {
  return static_cast<int>(&format - std::begin(kWireFormats));
}

// nullptr: there is none with this code.
constexpr const WireFormat* find_wire_format(std::int32_t code) {
  const auto* const found =
      std::find_if(std::begin(kWireFormats), std::end(kWireFormats),
                   [code](const WireFormat& format) { return format.code == code; });
  return found != std::end(kWireFormats) ? found : nullptr;
}

// Algorithms cut buffers at cache lines, into chunks of whole cache lines, or at Call::grain().
static_assert(std::all_of(std::begin(kWireFormats), std::end(kWireFormats),
                          [](const WireFormat& format) { return 64 % format.block_bytes == 0; }));

}  // namespace horoplug
