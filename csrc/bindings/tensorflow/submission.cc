#include "submission.h"

#include <algorithm>
#include <iterator>

#include "../common/core_failure.h"

namespace horoplug::tensorflow {
namespace {

// TensorFlow's number of each hp_dtype; negative: it has no such type.
constexpr int kNumbers[] = {
#define HP_DTYPE(code, NAME, Name, name, bytes, family, c_type, mantissa, nccl, since, mpi, numpy, \
                 dlpack, tf, xla)                                                                  \
  tf,
#include "horoplug/dtypes.def"
};

}  // namespace

std::int32_t data_type(TF_DataType type) {
  const auto* const found = std::ranges::find(kNumbers, static_cast<int>(type));
  if (type < 0 || found == std::end(kNumbers)) {
    throw Failure(kInvalidArgument, "tensors of this type are not supported");
  }
  return static_cast<std::int32_t>(found - kNumbers);
}

void check(hp_status status) {
  if (status == HP_OK) return;
  const auto failure = bindings::core_failure(status, hp_last_error());
  throw Failure(static_cast<Code>(failure.code), failure.message);
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
