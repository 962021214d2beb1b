// The table of the operations that TensorFlow gets, and their registration.
#pragma once

#include <array>
#include <cstdint>

#include "horoplug/horoplug.h"
#include "tf_api.h"

namespace horoplug::tensorflow {

// What an operation takes besides its tensors; each stands for attributes (see ops.cc).
enum Takes : unsigned {
  kTakesTensor = 1,
  kTakesTensors = 2,  // a group, in place of one tensor
  kTakesName = 4,
  kTakesReduction = 8,
  kTakesRoot = 16,
  kTakesSplits = 32,
  kTakesSet = 64,
  kTakesCompression = 128,
};

enum class Output {
  kNothing,
  kNumber,       // a scalar
  kLikeInput,    // a tensor of each input's shape
  kRows,         // a tensor with as many rows as the other ranks decide
  kRowsCounted,  // and one with the rows that came from each rank
};

// What the operations do that are over at once.
enum class Query { kNone, kSize, kLocalSize, kRank, kLocalRank, kIncluded, kDefers };

struct OpRow {
  const char* name = "";
  Output output = Output::kNothing;
  unsigned takes = 0;
  const char* result = "";  // name of the (first) output
  std::int32_t op = -1;     // hp_op; -1: a query
  const char* prefix = "";  // of names in the core, as other frameworks' have it
  Query query = Query::kNone;
  TF_DataType count_type = 0;  // of counts and numbers
  const char* counts = "";     // name of the output with the counts

  bool takes_any(unsigned what) const { return (takes & what) != 0; }
  // How many of so many inputs are tensors to work on.
  int tensors(int inputs) const { return takes_any(kTakesSplits) ? inputs - 1 : inputs; }
};

inline constexpr TF_DataType kInt32 = 3;
inline constexpr TF_DataType kInt64 = 9;

// The names, and those of their outputs, are Horovod's where it has the operation.
inline constexpr std::array kOps{
    OpRow{"HorovodAllreduce", Output::kLikeInput,
          kTakesTensor | kTakesName | kTakesReduction | kTakesCompression | kTakesSet, "sum",
          HP_ALLREDUCE, "allreduce"},
    OpRow{"HorovodGroupedAllreduce", Output::kLikeInput,
          kTakesTensors | kTakesName | kTakesReduction | kTakesCompression | kTakesSet, "sum",
          HP_ALLREDUCE, "allreduce"},
    OpRow{"HorovodAllgather", Output::kRowsCounted, kTakesTensor | kTakesName | kTakesSet, "output",
          HP_ALLGATHER, "allgather", Query::kNone, kInt64, "rows"},
    OpRow{"HorovodGroupedAllgather", Output::kRowsCounted, kTakesTensors | kTakesName | kTakesSet,
          "output", HP_ALLGATHER, "allgather", Query::kNone, kInt64, "rows"},
    OpRow{"HorovodBroadcast", Output::kLikeInput,
          kTakesTensor | kTakesName | kTakesRoot | kTakesSet, "output", HP_BROADCAST, "broadcast"},
    OpRow{"HorovodAlltoall", Output::kRowsCounted,
          kTakesTensor | kTakesName | kTakesSplits | kTakesSet, "output", HP_ALLTOALL, "alltoall",
          Query::kNone, kInt32, "received_splits"},
    OpRow{"HorovodReducescatter", Output::kRows,
          kTakesTensor | kTakesName | kTakesReduction | kTakesSet, "output", HP_REDUCESCATTER,
          "reducescatter"},
    OpRow{"HorovodGroupedReducescatter", Output::kRows,
          kTakesTensors | kTakesName | kTakesReduction | kTakesSet, "output", HP_REDUCESCATTER,
          "reducescatter"},
    OpRow{"HorovodJoin", Output::kNumber, kTakesSet, "last_joined_rank", HP_JOIN, "", Query::kNone,
          kInt32},
    OpRow{"HorovodBarrier", Output::kNothing, kTakesSet, "", HP_BARRIER},
    OpRow{"HorovodSize", Output::kNumber, kTakesSet, "size", -1, "", Query::kSize, kInt32},
    OpRow{"HorovodLocalSize", Output::kNumber, 0, "local_size", -1, "", Query::kLocalSize, kInt32},
    OpRow{"HorovodRank", Output::kNumber, kTakesSet, "rank", -1, "", Query::kRank, kInt32},
    OpRow{"HorovodLocalRank", Output::kNumber, 0, "local_rank", -1, "", Query::kLocalRank, kInt32},
    OpRow{"HorovodProcessSetIncluded", Output::kNumber, kTakesSet, "included", -1, "",
          Query::kIncluded, kInt32},
    // Whether asynchronous kernels can return before they have ended (see deferred_done.h).
    // TensorFlow has to run one to know.
    OpRow{"HorovodDefers", Output::kNumber, 0, "answer", -1, "", Query::kDefers, kInt32},
};

// Registers all operations and their kernels. Throws Failure.
void register_ops();

// What TensorFlow calls to know the shapes of an operation's outputs (shapes.cc).
void infer_shapes(const OpRow& row, TF_ShapeInferenceContext* context, TF_Status* status);

}  // namespace horoplug::tensorflow
