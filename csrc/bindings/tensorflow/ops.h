// The table of TensorFlow's operations, and their registration.
#pragma once

#include <array>
#include <cstdint>

#include "horoplug/horoplug.h"
#include "tf_api.h"

namespace horoplug::tensorflow {

// The inputs and options of an operation. Each stands for inputs and attributes in TensorFlow's
// notation (see ops.cc).
enum Takes : unsigned {
  kTakesTensor = 1,
  kTakesTensors = 2,  // a group instead of one tensor
  kTakesName = 4,
  kTakesReduction = 8,
  kTakesRoot = 16,
  kTakesSplits = 32,
  kTakesSet = 64,
  kTakesCompression = 128,
  kTakesLayout = 256,
};

enum class Output {
  kNothing,
  kNumber,       // a scalar
  kLikeInput,    // for each input, a tensor of its shape
  kRows,         // for each input, a tensor whose number of rows depends on the other ranks
  kRowsCounted,  // like kRows, and for each input a tensor with the rows received from each rank
};

// Operations that read a property of the job without communicating.
enum class Query { kNone, kSize, kLocalSize, kRank, kLocalRank, kIncluded, kDefers };

struct OpRow {
  const char* name = "";
  std::int32_t op = -1;  // hp_op; -1: a query
  Query query = Query::kNone;
  unsigned takes = 0;  // a sum of Takes
  Output output = Output::kNothing;
  const char* result = "";     // name of the output or, with kRowsCounted, of the first one
  const char* counts = "";     // name of the output with the row counts
  TF_DataType count_type = 0;  // of the row counts, or of the scalar of kNumber

  bool takes_any(unsigned what) const { return (takes & what) != 0; }
  // Number of data tensors among `inputs`.
  int tensor_count(int inputs) const { return takes_any(kTakesSplits) ? inputs - 1 : inputs; }
};

inline constexpr TF_DataType kInt32 = 3;
inline constexpr TF_DataType kInt64 = 9;

constexpr OpRow query_row(const char* name, Query query, const char* result, unsigned takes = 0) {
  return {.name = name,
          .query = query,
          .takes = takes,
          .output = Output::kNumber,
          .result = result,
          .count_type = kInt32};
}

// The names of operations and outputs are Horovod's where it has the operation.
inline constexpr std::array kOps{
    OpRow{.name = "HorovodAllreduce",
          .op = HP_ALLREDUCE,
          .takes = kTakesTensor | kTakesName | kTakesReduction | kTakesCompression | kTakesSet,
          .output = Output::kLikeInput,
          .result = "sum"},
    OpRow{.name = "HorovodGroupedAllreduce",
          .op = HP_ALLREDUCE,
          .takes = kTakesTensors | kTakesName | kTakesReduction | kTakesCompression | kTakesSet,
          .output = Output::kLikeInput,
          .result = "sum"},
    OpRow{.name = "HorovodAllgather",
          .op = HP_ALLGATHER,
          .takes = kTakesTensor | kTakesName | kTakesLayout | kTakesSet,
          .output = Output::kRowsCounted,
          .result = "output",
          .counts = "rows",
          .count_type = kInt64},
    OpRow{.name = "HorovodGroupedAllgather",
          .op = HP_ALLGATHER,
          .takes = kTakesTensors | kTakesName | kTakesSet,
          .output = Output::kRowsCounted,
          .result = "output",
          .counts = "rows",
          .count_type = kInt64},
    OpRow{.name = "HorovodBroadcast",
          .op = HP_BROADCAST,
          .takes = kTakesTensor | kTakesName | kTakesRoot | kTakesSet,
          .output = Output::kLikeInput,
          .result = "output"},
    OpRow{.name = "HorovodAlltoall",
          .op = HP_ALLTOALL,
          .takes = kTakesTensor | kTakesName | kTakesSplits | kTakesSet,
          .output = Output::kRowsCounted,
          .result = "output",
          .counts = "received_splits",
          .count_type = kInt32},
    OpRow{.name = "HorovodReducescatter",
          .op = HP_REDUCESCATTER,
          .takes = kTakesTensor | kTakesName | kTakesReduction | kTakesSet,
          .output = Output::kRows,
          .result = "output"},
    OpRow{.name = "HorovodGroupedReducescatter",
          .op = HP_REDUCESCATTER,
          .takes = kTakesTensors | kTakesName | kTakesReduction | kTakesSet,
          .output = Output::kRows,
          .result = "output"},
    OpRow{.name = "HorovodJoin",
          .op = HP_JOIN,
          .takes = kTakesSet,
          .output = Output::kNumber,
          .result = "last_joined_rank",
          .count_type = kInt32},
    OpRow{.name = "HorovodBarrier", .op = HP_BARRIER, .takes = kTakesSet},
    query_row("HorovodSize", Query::kSize, "size", kTakesSet),
    query_row("HorovodLocalSize", Query::kLocalSize, "local_size"),
    query_row("HorovodRank", Query::kRank, "rank", kTakesSet),
    query_row("HorovodLocalRank", Query::kLocalRank, "local_rank"),
    query_row("HorovodProcessSetIncluded", Query::kIncluded, "included", kTakesSet),
    // Whether asynchronous kernels can return before they have ended (see deferred_done.h). Only a
    // kernel that runs can find out.
    query_row("HorovodDefers", Query::kDefers, "answer"),
};

// Registers all operations and their kernels. Throws Failure.
void register_ops();

// TensorFlow's callback for shape inference (shapes.cc).
void infer_shapes(const OpRow& row, TF_ShapeInferenceContext* context, TF_Status* status);

}  // namespace horoplug::tensorflow
