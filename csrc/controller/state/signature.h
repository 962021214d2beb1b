// The properties of an operation that all ranks must agree on before it may run.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/operations.h"
#include "base/status.h"
#include "base/types.h"
#include "base/wire_format.h"
#include "controller/state/rank_ranges.h"

namespace horoplug {

using Shape = std::vector<std::int64_t>;

struct Signature {
  OpKind op = OpKind::kBarrier;
  DType dtype = DType::kUInt8;
  // How the elements of an allreduce travel; nullptr: as they are.
  const WireFormat* wire = nullptr;
  ReduceOp reduce = ReduceOp::kSum;
  std::int32_t root = 0;
  std::int32_t device = -1;
  double prescale = 1.0;
  double postscale = 1.0;
  // One shape per tensor; more than one for a group. kAddSet: the ranks. kRemoveSet and
  // kReleaseSet: the set's number. kAddBuffer: the size in bytes.
  std::vector<Shape> shapes;
  // What the tensors are parts of, in words: see hp_submission.
  std::string layout;
  // Whether the name may recur and is worth an id. Generated names, which contain a counter, are
  // not.
  bool recurring = true;

  // Names the form in which elements travel.
  std::int32_t wire_code() const {
    return wire != nullptr ? wire->code : static_cast<std::int32_t>(dtype);
  }
  DType wire_dtype() const { return wire != nullptr ? wire->dtype : dtype; }
  // The bytes that so many elements of one tensor take as they travel.
  std::size_t wire_bytes(std::int64_t elements) const {
    const auto count = static_cast<std::size_t>(elements);
    return wire != nullptr ? wire->bytes(count) : count * dtype_size(dtype);
  }

  bool operator==(const Signature&) const = default;
};

// The longest name and the longest layout, in bytes.
inline constexpr std::size_t kLongestName = 1 << 16;

// The first dimension of a tensor; a scalar has one row.
std::int64_t rows_of(const Shape& shape);
std::int64_t elements_of(const Shape& shape);
// The number of elements of one row.
std::int64_t row_elements(const Shape& shape);

std::string describe_shape(const Shape& shape);

// The bytes of all tensors together, as they travel.
std::int64_t payload_bytes(const Signature& signature);

// Whether operations with these signatures can run together: everything that matters for the kind
// is equal. For allgather and alltoall the first dimension may differ.
bool compatible(const Signature& a, const Signature& b);

// A hash: equal for equal signatures, and different for different ones with high probability.
std::uint64_t digest(const Signature& signature);

// Whether two operations may share a batch.
bool fusable(const Signature& a, const Signature& b);

// A signature, and the ranks that have submitted it.
struct Variant {
  Signature signature;
  RankRanges ranks;
};

// The error of an operation whose variants differ: one line has each side's value and ranks.
Status mismatch(const std::string& name, const std::vector<Variant>& variants);

}  // namespace horoplug
