// One submitted operation, from its submission to the release of its handle.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "controller/members.h"
#include "controller/signature.h"
#include "device/cuda/runtime/device.h"
#include "transport/shm/shared_buffer.h"

namespace horoplug {

// Memory of a result: the host's, or a GPU's, which is given back once the stream has done what it
// has to do by then.
struct Deleter {
  std::shared_ptr<cuda::Device> device = nullptr;
  CUstream stream = nullptr;
  void operator()(void* data) const;
};
using Allocation = std::unique_ptr<void, Deleter>;

struct TensorArgument {
  const std::byte* input = nullptr;  // nullptr in an operation that this rank has not submitted
  std::byte* output = nullptr;       // nullptr: the engine allocates
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
  MembersPtr members;
  std::string name;
  Signature signature;
  std::vector<TensorArgument> tensors;
  std::vector<std::int64_t> splits;  // alltoall: rows for each rank
  double submitted_at = 0;
  std::uint64_t dependency_epoch = 0;  // see DependencyQuery
  // Not submitted here, since this rank has joined: it takes part with what changes nothing, and
  // nobody looks at the result.
  bool absent = false;

  // Of tensors on a GPU, which is GPU->ordinal(). `ready` says when they may be read and written.
  // Once the operation is done, `finished` says when the results are there.
  struct Gpu {
    int ordinal = -1;  // -1: they are on the CPU
    CUstream stream = nullptr;
    std::shared_ptr<cuda::Device> device;
    cuda::EventPtr ready, finished;
  };
  Gpu gpu;

  // The buffer in which all tensors lie, each being its own output; kAddBuffer: the new one.
  std::shared_ptr<SharedBuffer> buffer;

  // Written by whoever drives the engine, read by others once the operation is done.
  std::vector<TensorOutcome> outcomes;
  std::int64_t value =
      0;  // kAddSet, kAddBuffer: the new one's number; kJoin: the last rank to join
  Status status;

  // Set when all of the above is written. What belongs to the handle is in the handle table's care.
  std::atomic<bool> done{false};
  struct Waiting {
    bool released = false;
    int waiters = 0;             // threads that are blocked on it
    int sleepers = 0;            // those of them that are to be notified
    double left_wait_at = -1e9;  // a wait that timed out is usually taken up again at once
    std::condition_variable ended;
    hp_done done = nullptr;  // to be called when it has ended
    void* done_context = nullptr;
  } waiting;

  // Of tensor `index`; throws Error(HP_INVALID_ARGUMENT) if there is none.
  const TensorOutcome& outcome(int index) const {
    if (index < 0 || static_cast<std::size_t>(index) >= outcomes.size()) {
      throw Error(HP_INVALID_ARGUMENT, "the operation has no tensor " + std::to_string(index));
    }
    return outcomes[static_cast<std::size_t>(index)];
  }

  // "allreduce 'grad.0'", for messages. Names of bindings begin with the operation already.
  std::string describe() const {
    const std::string kind = op_kind_name(signature.op);
    const bool says_kind = name == kind || name.starts_with(kind + ".");
    std::string text = name.empty() ? kind
                       : says_kind  ? "'" + name + "'"
                                    : kind + " '" + name + "'";
    if (members->set != 0) text += " (process set " + std::to_string(members->set) + ")";
    return text;
  }

  // What must be unique among the operations in flight. A name can be used in every set.
  std::string key() const {
    return members->set == 0 ? name : name + '\0' + std::to_string(members->set);
  }
};

using OperationPtr = std::shared_ptr<Operation>;

}  // namespace horoplug
