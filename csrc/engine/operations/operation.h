// One submitted operation, from its submission to the release of its handle.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/inline_vector.h"
#include "base/running_clock.h"
#include "base/status.h"
#include "controller/state/identity.h"
#include "controller/state/members.h"
#include "device/cuda/runtime/device.h"
#include "transport/shm/shared_buffer.h"

namespace horoplug {

// Frees the memory of a result. GPU memory is given back once the stream has done the work that it
// has been given so far.
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
  IdentityPtr identity;  // whose name may be empty until the queue of submissions gives it one
  InlineVector<TensorArgument> tensors;
  std::vector<std::int64_t> splits;  // alltoall, scatter on its root: rows for each rank
  std::int32_t tag = 0;              // send, recv
  SteadyTime submitted_at;
  // When the engine has taken it from the queue: the begin of its time limits. Nothing can be said
  // of the peers before that, and the queue may hold an operation for which nobody waits.
  RunningTime pending_since;
  std::uint64_t dependency_stage = 0;  // see DependencyQuery
  bool counts_caller = false;          // its thread may submit other operations: see CallerThreads
  // This rank has joined and has not submitted the operation: it takes part with the identity
  // element, and nobody observes the result.
  bool absent = false;

  // Tensors on a GPU, which is device->ordinal(). After the event `ready` they may be read and
  // written. Once the operation is done, the results are there after the event `finished`.
  struct Gpu {
    int ordinal = -1;  // -1: the tensors are on the CPU
    CUstream stream = nullptr;
    std::shared_ptr<cuda::Device> device;
    cuda::EventPtr ready, finished;
  };
  Gpu gpu;

  // The shared buffer that contains all tensors, which are their own outputs; kAddBuffer: the new
  // buffer.
  std::shared_ptr<SharedBuffer> buffer;

  // Written by the thread that runs the loop, and read by others once the operation is done.
  InlineVector<TensorOutcome> outcomes;
  // kAddSet, kAddBuffer: the number of the new set or buffer; kJoin: the last rank to join.
  std::int64_t value = 0;
  Status status;

  // All ranks have submitted it, so that it runs, or is about to.
  std::atomic<bool> decided{false};
  // A report for a search for deadlocks has named it.
  std::atomic<bool> reported{false};
  bool is_numbered = false;  // the queue of submissions has given it its name

  // Set when all of the above is written.
  std::atomic<bool> done{false};
  // Under the lock of the handle table.
  struct Waiting {
    bool released = false;
    int waiters = 0;                     // threads that are blocked on it
    int sleepers = 0;                    // those of them that sleep on the condition variable
    SteadyTime left_wait_at = kLongAgo;  // callers often wait again after a timeout
    SteadyTime noted_at = kLongAgo;  // when a thread was seen to wait for it outside of the core
    std::condition_variable ended;
    hp_done done = nullptr;  // to be called when it has ended
    void* done_context = nullptr;
  } waiting;

  const std::string& name() const { return identity->name; }
  const Signature& signature() const { return identity->signature; }
  // The result for tensor `index`; throws Error(HP_INVALID_ARGUMENT) if there is none.
  const TensorOutcome& outcome(int index) const;
  // "allreduce 'grad.0'", for messages. Names that bindings give begin with the operation already.
  std::string describe() const;
};

using OperationPtr = std::shared_ptr<Operation>;
using OperationList = InlineVector<OperationPtr>;  // of a batch: most have one operation

}  // namespace horoplug
