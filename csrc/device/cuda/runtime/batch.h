// From tensors to what a kernel is told: pure functions, without CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/types.h"
#include "device/cpu/kernels.h"
#include "device/cuda/kernels/tables.h"

namespace horoplug::cuda {

// A run of elements that a kernel takes from one place to another. `from` is an address; for
// kernels with several sources, how many bytes into each of them; with `fill`, the element itself.
struct Transfer {
  std::uint64_t from = 0;
  std::uint64_t to = 0;
  std::uint64_t count = 0;  // elements
  bool fill = false;
};

struct BatchTable {
  std::vector<Chunk> chunks;
  std::uint32_t tiles = 0;
};

// Bytes of an element that a kernel reads and of one that it writes.
struct ElementSizes {
  std::size_t read, written;
};

// The chunks of the transfers that are not empty. `bases` are the addresses that `from` is added
// to. Throws Error if an address is not that of an element, which a GPU would not forgive, or if
// there are more than 2^32 - 1 tiles.
BatchTable make_table(std::span<const Transfer> transfers, ElementSizes sizes,
                      std::span<const std::uint64_t> bases = {});

// Where tensors lie in a fusion buffer: each at a multiple of 16 bytes, so that memory is accessed
// in vectors. The same on all ranks, as it depends on sizes alone.
struct FusedLayout {
  std::vector<std::uint64_t> offsets;
  std::uint64_t bytes = 0;
};
FusedLayout lay_out(std::span<const std::uint64_t> tensor_bytes);

// How a kernel that computes elements of this type finishes them.
FinishArgs finish_args(DType dtype, const Finish& finish);

// Names of kernels, see kernels/list.def. Throws Error(HP_UNSUPPORTED) for a conversion that there
// is none for: between float32 and the floats of 16 bits there is.
std::string move_kernel(DType from, DType to, const Finish& finish);
std::string reduce_kernel(ReduceOp op, DType dtype);

}  // namespace horoplug::cuda
