// Converts tensors to kernel arguments: pure functions, without CUDA.
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

// A run of elements that a kernel moves. `from` is an address; for kernels with several sources, an
// offset in bytes into each of them; with `fill`, the element itself.
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

// Bytes of an element that a kernel reads, and of one that it writes.
struct ElementSizes {
  std::size_t read, written;
};

// The chunks of the non-empty transfers. `bases`: the addresses to which `from` is added. Throws
// Error if an address is not aligned to the element, which would fault on the GPU, or if there are
// more than 2^32 - 1 tiles.
BatchTable make_table(std::span<const Transfer> transfers, ElementSizes sizes,
                      std::span<const std::uint64_t> bases = {});

// The positions of tensors in a fusion buffer: each at a multiple of 16 bytes, so that memory
// accesses are vectorised. Equal on all ranks, because they depend on sizes alone.
struct FusedLayout {
  std::vector<std::uint64_t> offsets;
  std::uint64_t bytes = 0;
};
FusedLayout lay_out(std::span<const std::uint64_t> tensor_bytes);

// How a kernel that computes elements of this type finishes them.
FinishArgs finish_args(DType dtype, const Finish& finish);

// Names of kernels; see kernels/list.def. Throws Error(HP_UNSUPPORTED) for a conversion without a
// kernel: only those between float32 and 16-bit floats exist.
std::string move_kernel(DType from, DType to, const Finish& finish);
std::string reduce_kernel(ReduceOp op, DType dtype);

}  // namespace horoplug::cuda
