// Sizes and names of the shared types. The names appear in error messages and timelines.
#include "base/types.h"

#include <iterator>

namespace horoplug {
namespace {

struct DTypeInfo {
  std::size_t size;
  const char* name;
};

// Indexed by the values of DType.
constexpr DTypeInfo kDTypes[] = {
#define HP_DTYPE(code, NAME, Name, name, bytes, ...) {bytes, #name},
#include "horoplug/dtypes.def"
};
static_assert(std::size(kDTypes) == kDTypeCount, "the codes of dtypes.def are 0, 1, 2, ...");
constexpr const char* kReduceOps[] = {"average", "sum", "adasum", "min", "max", "product"};

// The value may come from the network: a value outside the enumeration must not crash the error
// message about it.
template <class Entry, int kExpected, int kCount, class Enum>
const Entry* lookup(const Entry (&table)[kCount], Enum value) {
  static_assert(kCount == kExpected);
  const auto index = static_cast<int>(value);
  return index < kCount ? &table[index] : nullptr;
}

}  // namespace

std::size_t dtype_size(DType dtype) {
  const DTypeInfo* info = lookup<DTypeInfo, kDTypeCount>(kDTypes, dtype);
  return info ? info->size : 0;
}

const char* dtype_name(DType dtype) {
  const DTypeInfo* info = lookup<DTypeInfo, kDTypeCount>(kDTypes, dtype);
  return info ? info->name : "unknown dtype";
}

const char* reduce_op_name(ReduceOp op) {
  const char* const* name = lookup<const char*, kReduceOpCount>(kReduceOps, op);
  return name ? *name : "unknown reduction";
}

}  // namespace horoplug
