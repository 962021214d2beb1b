// Asynchronous kernels for a TensorFlow whose C API has none, which is TensorFlow 2.12.
//
// TensorFlow's C++ library has a base class for them in every version, tensorflow::AsyncOpKernel.
// This file derives from it without TensorFlow's headers: a kernel is an object that
// AsyncOpKernel's base class, OpKernel, constructs, with a copy of AsyncOpKernel's table of virtual
// functions. In the copy, the pure virtual function, ComputeAsync, and the destructors are
// replaced.
//
// The names of the C++ functions contain the types of their parameters, so that they are not found
// in a version with other types. The tables must have the destructors and OpKernel::Compute in the
// expected places. Otherwise there are no derived kernels.
#pragma once

#include <span>
#include <string>

#include "tf_api.h"

namespace horoplug::tensorflow {

// The functions of a kernel, as for TF_NewAsyncKernelBuilder.
struct AsyncKernelFunctions {
  CreateKernel create;
  ComputeAsync compute;
  DeleteKernel remove;
};

// Looks up what derived kernels need in TensorFlow's library. Returns whether everything is there.
bool load_derived_kernels(void* library);

// Whether load_derived_kernels() has succeeded.
bool can_derive_kernels();

// Registers a kernel whose arguments of the given names are in the CPU's memory. Requires
// can_derive_kernels(). `functions` must exist until the process ends.
void register_derived_kernel(const char* op, const char* device,
                             std::span<const std::string> host_arguments,
                             const AsyncKernelFunctions& functions);

// TF_RunAsyncOpKernelDoneCallback for the callback of a derived kernel.
void run_derived_done(TF_AsyncOpKernelDoneCallback* done);

}  // namespace horoplug::tensorflow
