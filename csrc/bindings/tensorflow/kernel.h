// A kernel of TensorFlow: an operation of a graph, or in eager mode a cached one.
#pragma once

#include <string>
#include <string_view>

#include "ops.h"

namespace horoplug::tensorflow {

// The name by which the ranks match an operation, the same in every framework. Empty if `name` is:
// the core then chooses one.
std::string wire_name(const OpRow& row, std::string_view name);

struct Kernel {
  explicit Kernel(const OpRow& op) : row(op) {}
  // Reads the attributes of the operation. Throws Failure.
  Kernel(const OpRow& op, TF_OpKernelConstruction* construction);

  const OpRow& row;
  std::string name;  // in the core; empty: the core chooses one
  // The caller waits for the kernel, as in eager mode, so the kernel need not return early.
  bool blocking = false;
  std::int32_t reduce_op = HP_SUM;
  double prescale = 1;
  double postscale = 1;
  std::int32_t wire_dtype = 0;
  std::int32_t root = 0;
  std::int32_t process_set = 0;
  std::string layout;  // see hp_submission
};

// Runs a kernel and waits until it has ended.
void compute(const Kernel& kernel, TF_OpKernelContext* context);

// Starts a kernel and returns, unless it is blocking. `done` is called when it has ended.
void compute_async(const Kernel& kernel, TF_OpKernelContext* context,
                   TF_AsyncOpKernelDoneCallback* done);

}  // namespace horoplug::tensorflow
