// Ends operations: sets their status, frees their names and wakes the threads that wait for them.
#pragma once

#include <span>

#include "engine/operations/handle_table.h"
#include "engine/operations/submission_queue.h"
#include "engine/tracing.h"

namespace horoplug {

// Used by the thread that runs the loop.
class Completion {
 public:
  Completion(SubmissionQueue& submissions, HandleTable& handles, Tracing& tracing)
      : submissions_(submissions), handles_(handles), tracing_(tracing) {}

  // All of these operations have ended with this status. A failure names the operation.
  void end(std::span<const OperationPtr> operations, const Status& status);
  void end(const OperationPtr& operation, const Status& status) { end({&operation, 1}, status); }

 private:
  SubmissionQueue& submissions_;
  HandleTable& handles_;
  Tracing& tracing_;
};

}  // namespace horoplug
