// Sizes and names of the shared types. The names appear in error messages and timelines.
#include "base/types.h"

namespace horoplug {
namespace {

struct DTypeInfo {
  std::size_t size;
  const char* name;
};

// Indexed by the values of DType.
constexpr DTypeInfo kDTypes[] = {
    {1, "uint8"},    {1, "int8"},    {2, "uint16"},  {2, "int16"},   {4, "int32"},
    {8, "int64"},    {2, "float16"}, {4, "float32"}, {8, "float64"}, {1, "bool"},
    {2, "bfloat16"}, {4, "uint32"},  {8, "uint64"},
};
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
