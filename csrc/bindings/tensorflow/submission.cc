#include "submission.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>

namespace horoplug::tensorflow {
namespace {

// hp_dtype by TensorFlow's numbers; -1: the core has no such type.
constexpr int kMaxType = std::max({
#define HP_DTYPE(code, NAME, Name, name, bytes, family, c_type, mantissa, nccl, since, mpi, numpy, \
                 dlpack, tf, xla)                                                                  \
  tf,
#include "horoplug/dtypes.def"
});
constexpr auto kDataTypes = [] {
  std::array<std::int32_t, kMaxType + 1> types{};
  types.fill(-1);
#define HP_DTYPE(code, NAME, Name, name, bytes, family, c_type, mantissa, nccl, since, mpi, numpy, \
                 dlpack, tf, xla)                                                                  \
  if ((tf) >= 0) types[tf] = code;
#include "horoplug/dtypes.def"
  return types;
}();

// The failure of a call of the core in TensorFlow's codes. As in Horovod, a broken job is an
// UnknownError, and a mismatch between ranks is a FailedPreconditionError. Failures of all ranks
// are recognised by their text (horoplug/tensorflow/elastic.py).
Failure failure_of(hp_status status) {
  Code code = kUnknown;
  switch (status) {
    case HP_INVALID_ARGUMENT:
    case HP_DUPLICATE_NAME:
    case HP_UNSUPPORTED:
      return {kInvalidArgument, hp_last_error()};
    case HP_MISMATCH:
    case HP_DEADLOCK:
      code = kFailedPrecondition;
      break;
    case HP_INTERNAL:
      code = kInternal;
      break;
    default:
      break;
  }
  return {code, std::string("a Horovod operation has failed: ") + hp_last_error()};
}

}  // namespace

std::int32_t data_type(TF_DataType type) {
  const auto index = static_cast<std::size_t>(type);
  const std::int32_t known = index < kDataTypes.size() ? kDataTypes[index] : -1;
  if (known < 0) throw Failure(kInvalidArgument, "tensors of this type are not supported");
  return known;
}

void check(hp_status status) {
  if (status != HP_OK) throw failure_of(status);
}

Failure not_initialized() {
  return {kFailedPrecondition, "Horovod has not been initialized; use hvd.init()"};
}

hp_submission submission_of(const Kernel& kernel, std::int32_t dtype,
                            std::span<const hp_tensor> tensors) {
  hp_submission submission{};
  submission.struct_size = sizeof submission;
  submission.pool_thread = 1;
  submission.op = kernel.row.op;
  submission.dtype = dtype;
  submission.reduce_op = kernel.reduce_op;
  submission.root = kernel.root;
  submission.device = -1;
  submission.process_set = kernel.process_set;
  submission.prescale = kernel.prescale;
  submission.postscale = kernel.postscale;
  submission.wire_dtype = kernel.wire_dtype;
  submission.name = kernel.name.empty() ? nullptr : kernel.name.c_str();
  submission.layout = kernel.layout.c_str();
  submission.tensors = tensors.data();
  submission.tensor_count = static_cast<std::int32_t>(tensors.size());
  return submission;
}

std::int64_t query_result(const Kernel& kernel, const EngineSlot::Lease& lease) {
  std::int32_t size = 0;
  std::int32_t rank = lease->rank;
  if (kernel.row.takes_any(kTakesSet)) {
    check(hp_process_set_size(lease->engine, kernel.process_set, &size, &rank));
  }
  switch (kernel.row.query) {
    case Query::kSize:
      return size;
    case Query::kLocalSize:
      return lease->local_size;
    case Query::kRank:
      return rank;
    case Query::kLocalRank:
      return lease->local_rank;
    case Query::kIncluded:
      return rank >= 0 ? 1 : 0;
    case Query::kDefers:  // see KernelRun::answer
    case Query::kNone:
      break;
  }
  return 0;
}

}  // namespace horoplug::tensorflow
