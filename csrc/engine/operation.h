// One submitted operation, from its submission to the release of its handle.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/signature.h"

namespace horoplug {

struct FreeDeleter {
  void operator()(void* data) const { std::free(data); }
};
using Allocation = std::unique_ptr<void, FreeDeleter>;

struct TensorArgument {
  const std::byte* input = nullptr;
  std::byte* output = nullptr;  // nullptr: the engine allocates
};

struct TensorOutcome {
  Allocation owned;
  void* data = nullptr;
  std::int64_t bytes = 0;
  std::int64_t rows = 0;
  std::vector<std::int64_t> row_counts;  // by rank of the process set
};

struct Operation {
  // Fixed at submission.
  hp_handle handle = 0;
  std::uint32_t set = 0;
  std::string name;
  Signature signature;
  std::vector<TensorArgument> tensors;
  std::vector<std::int64_t> splits;  // alltoall: rows for each rank
  double submitted_at = 0;

  // Written by the progress thread, read by others once the operation is done.
  std::vector<TensorOutcome> outcomes;
  Status status;

  // "allreduce 'grad.0'", for messages. Names of bindings begin with the operation already.
  std::string describe() const {
    const std::string kind = op_kind_name(signature.op);
    if (name.empty()) return kind;
    return name.starts_with(kind + ".") ? "'" + name + "'" : kind + " '" + name + "'";
  }
};

using OperationPtr = std::shared_ptr<Operation>;

}  // namespace horoplug
