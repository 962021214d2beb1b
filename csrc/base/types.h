// Element types, reduction operators and kinds of operations, which every layer shares.
#pragma once

#include <cstddef>
#include <cstdint>

#include "horoplug/horoplug.h"

namespace horoplug {

enum class DType : std::uint8_t {
  kUInt8 = HP_UINT8,
  kInt8 = HP_INT8,
  kUInt16 = HP_UINT16,
  kInt16 = HP_INT16,
  kInt32 = HP_INT32,
  kInt64 = HP_INT64,
  kFloat16 = HP_FLOAT16,
  kFloat32 = HP_FLOAT32,
  kFloat64 = HP_FLOAT64,
  kBool = HP_BOOL,
  kBFloat16 = HP_BFLOAT16,
  kUInt32 = HP_UINT32,
  kUInt64 = HP_UINT64,
};
inline constexpr int kDTypeCount = HP_DTYPE_COUNT;

enum class ReduceOp : std::uint8_t {
  kAverage = HP_AVERAGE,
  kSum = HP_SUM,
  kAdasum = HP_ADASUM,
  kMin = HP_MIN,
  kMax = HP_MAX,
  kProduct = HP_PRODUCT,
};
inline constexpr int kReduceOpCount = HP_REDUCE_OP_COUNT;

enum class OpKind : std::uint8_t {
  kAllreduce = HP_ALLREDUCE,
  kAllgather = HP_ALLGATHER,
  kBroadcast = HP_BROADCAST,
  kAlltoall = HP_ALLTOALL,
  kReducescatter = HP_REDUCESCATTER,
  kBarrier = HP_BARRIER,
  kJoin = HP_JOIN,
  kAddSet = HP_ADD_PROCESS_SET,
  kRemoveSet = HP_REMOVE_PROCESS_SET,
  kAddBuffer = HP_CREATE_BUFFER,
  kReduce = HP_REDUCE,
  kGather = HP_GATHER,
  kScatter = HP_SCATTER,
  kSend = HP_SEND,
  kReceive = HP_RECV,
};
inline constexpr int kOpKindCount = HP_OP_COUNT;

std::size_t dtype_size(DType dtype);
const char* dtype_name(DType dtype);
const char* reduce_op_name(ReduceOp op);

inline bool is_floating(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kFloat32 || dtype == DType::kFloat64 ||
         dtype == DType::kBFloat16;
}

}  // namespace horoplug
