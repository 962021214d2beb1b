// A kernel: an operation in a graph or, in eager mode, one that TensorFlow has cached.
#pragma once

#include <string>

#include "ops.h"

namespace horoplug::tensorflow {

struct Kernel {
  explicit Kernel(const OpRow& op) : row(op) {}
  // Reads the attributes. Throws Failure.
  Kernel(const OpRow& op, TF_OpKernelConstruction* construction);

  const OpRow& row;
  std::string name;  // in the core; empty: the core numbers it
  // The thread that runs the kernel waits for it anyway, as in eager mode.
  bool blocking = false;
  std::int32_t reduce_op = HP_SUM;
  double prescale = 1;
  double postscale = 1;
  std::int32_t wire_dtype = 0;
  std::int32_t root = 0;
  std::int32_t process_set = 0;
};

// Runs it to its end.
void compute(const Kernel& kernel, TF_OpKernelContext* context);

// Starts it and returns, unless it is a blocking one.
void compute_async(const Kernel& kernel, TF_OpKernelContext* context,
                   TF_AsyncOpKernelDoneCallback* done);

}  // namespace horoplug::tensorflow
