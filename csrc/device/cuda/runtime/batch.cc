#include "device/cuda/runtime/batch.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "base/status.h"

namespace horoplug::cuda {
namespace {

// Powers of two, as most world sizes are: multiplying by the reciprocal gives the same bits.
template <typename S, typename Bits>
bool has_exact_reciprocal(S divide) {
  constexpr int kMantissa = std::numeric_limits<S>::digits - 1;
  constexpr Bits kExponents = (Bits{1} << (8 * sizeof(S) - 1 - kMantissa)) - 1;
  const Bits bits = std::bit_cast<Bits>(divide);
  const Bits exponent = bits >> kMantissa & kExponents;
  return (bits & ((Bits{1} << kMantissa) - 1)) == 0 && exponent >= 2 && exponent <= kExponents - 3;
}

template <typename S, typename Bits>
FinishArgs finish_floats(const Finish& finish) {
  const S multiply = static_cast<S>(finish.multiply);
  const S divide = static_cast<S>(finish.divide);
  if (has_exact_reciprocal<S, Bits>(divide)) return {kMultiply, 0, 0, multiply, S{1} / divide};
  return {kDivide, 0, 0, multiply, divide};
}

FinishArgs finish_integers(std::size_t size, const Finish& finish) {
  const bool negative = finish.divide < 0;
  const double magnitude = negative ? -finish.divide : finish.divide;
  FinishArgs args{kThroughFloat, negative, 0, finish.multiply, finish.divide};
  // Float64 does not hold 64-bit integers exactly: a division alone is done in integers.
  if (size < 8 || finish.multiply != 1.0) return args;
  if (magnitude >= 0x1p64) {
    args.mode = kAllZero;
  } else if (magnitude >= 1) {
    args.divisor = static_cast<std::uint64_t>(magnitude);
    if (static_cast<double>(args.divisor) != magnitude) return args;
    args.mode = std::has_single_bit(args.divisor) ? kExactShift : kExactDivide;
    if (args.mode == kExactShift) args.divisor = std::countr_zero(args.divisor);
  }
  return args;
}

// The required alignment of an element's address. Elements of 16 bytes have two parts.
std::size_t alignment_of(std::size_t size) { return std::min<std::size_t>(size, 8); }

// Whether all addresses, read and written, are multiples of this number of bytes.
bool is_aligned(const Transfer& transfer, ElementSizes to, std::span<const std::uint64_t> bases) {
  return (transfer.fill || transfer.from % to.read == 0) && transfer.to % to.written == 0 &&
         std::all_of(bases.begin(), bases.end(),
                     [to](std::uint64_t address) { return address % to.read == 0; });
}

}  // namespace

BatchTable make_table(std::span<const Transfer> transfers, ElementSizes sizes,
                      std::span<const std::uint64_t> bases) {
  const std::uint64_t tile = kTileBytes / std::min(sizes.read, sizes.written);
  BatchTable table;
  table.chunks.reserve(transfers.size());
  std::uint64_t tiles = 0;
  for (const Transfer& transfer : transfers) {
    if (transfer.count == 0) continue;
    if (!is_aligned(transfer, {alignment_of(sizes.read), alignment_of(sizes.written)}, bases)) {
      throw Error(HP_INVALID_ARGUMENT, "a tensor's memory on a GPU is not aligned to its elements");
    }
    const std::uint32_t flags =
        (is_aligned(transfer, {16, 16}, bases) ? kAligned : 0) | (transfer.fill ? kFill : 0);
    table.chunks.push_back(
        {transfer.from, transfer.to, transfer.count, static_cast<std::uint32_t>(tiles), flags});
    tiles += (transfer.count - 1) / tile + 1;
    if (tiles > std::numeric_limits<std::uint32_t>::max()) {
      throw Error(HP_INVALID_ARGUMENT, "a batch on a GPU is too large");
    }
  }
  table.tiles = static_cast<std::uint32_t>(tiles);
  return table;
}

FusedLayout lay_out(std::span<const std::uint64_t> tensor_bytes) {
  FusedLayout layout;
  layout.offsets.reserve(tensor_bytes.size());
  for (const std::uint64_t bytes : tensor_bytes) {
    layout.offsets.push_back(layout.bytes);
    layout.bytes += (bytes + 15) / 16 * 16;
  }
  return layout;
}

FinishArgs finish_args(DType dtype, const Finish& finish) {
  if (finish.is_identity() || dtype == DType::kBool) return {kNoFinish, 0, 0, 1, 1};
  if (!is_floating(dtype) && !is_complex(dtype)) return finish_integers(dtype_size(dtype), finish);
  const bool is_double = dtype_size(dtype) == (is_complex(dtype) ? 16 : 8);
  return is_double ? finish_floats<double, std::uint64_t>(finish)
                   : finish_floats<float, std::uint32_t>(finish);
}

std::string move_kernel(DType from, DType to, const Finish& finish) {
  if (from != to) {
    const bool known =
        (from == DType::kFloat32 && is_half(to)) || (to == DType::kFloat32 && is_half(from));
    if (!known) {
      throw Error(HP_UNSUPPORTED,
                  std::string("no kernel converts ") + dtype_name(from) + " to " + dtype_name(to));
    }
    return std::string("cast_") + dtype_name(from) + "_" + dtype_name(to);
  }
  if (finish_args(from, finish).mode == kNoFinish) {
    return "copy_" + std::to_string(8 * dtype_size(from));
  }
  return std::string("scale_") + dtype_name(from);
}

std::string reduce_kernel(ReduceOp op, DType dtype) {
  if (op == ReduceOp::kAdasum) throw Error(HP_UNSUPPORTED, "no kernel reduces by Adasum alone");
  const ReduceOp kernel = op == ReduceOp::kAverage ? ReduceOp::kSum : op;
  return std::string("reduce_") + reduce_op_name(kernel) + "_" + dtype_name(dtype);
}

}  // namespace horoplug::cuda
