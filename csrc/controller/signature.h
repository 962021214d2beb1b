// What ranks must agree about before an operation may run.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/types.h"

namespace horoplug {

using Shape = std::vector<std::int64_t>;

struct Signature {
  OpKind op = OpKind::kBarrier;
  DType dtype = DType::kUInt8;
  // Compression: the type of 16 bits in which the elements of an allreduce of float32 travel.
  std::optional<DType> compressed;
  ReduceOp reduce = ReduceOp::kSum;
  std::int32_t root = 0;
  std::int32_t device = -1;
  double prescale = 1.0;
  double postscale = 1.0;
  // One per tensor; more than one in a group. kAddSet: the ranks, kRemoveSet: the set's number,
  // kAddBuffer: the size in bytes.
  std::vector<Shape> shapes;
  // A name that will come again is worth a number of its own; those that count themselves up are
  // not.
  bool recurring = true;

  DType wire_dtype() const { return compressed.value_or(dtype); }

  bool operator==(const Signature&) const = default;
};

// Bytes of an operation's name.
inline constexpr std::size_t kLongestName = 1 << 16;

// Rows of a tensor: its first dimension; a scalar is one row.
std::int64_t rows_of(const Shape& shape);
std::int64_t elements_of(const Shape& shape);
// Elements of one row.
std::int64_t row_elements(const Shape& shape);

std::string describe_shape(const Shape& shape);

// Bytes of all tensors together, as they travel.
std::int64_t payload_bytes(const Signature& signature);

// Whether operations of these signatures can run together: all that counts for the kind is equal
// (the first dimension does not count for allgather and alltoall).
bool compatible(const Signature& a, const Signature& b);

// A number that is equal for equal signatures, and hardly ever otherwise.
std::uint64_t digest(const Signature& signature);

// Whether two operations may share a batch.
bool fusable(const Signature& a, const Signature& b);

// A signature as one group of ranks has submitted it.
struct Variant {
  Signature signature;
  std::vector<int> ranks;
};

// One line that says in what the variants of an operation differ: every side's value and its ranks.
std::string describe_mismatch(const std::string& name, const std::vector<Variant>& variants);

}  // namespace horoplug
