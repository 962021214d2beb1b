// The device and the stream of a custom call that runs on a GPU.
#pragma once

#include <cstdint>
#include <string>

#include "xla_ffi.h"

namespace horoplug::jax {

struct GpuStream {
  std::int32_t device = -1;  // CUDA ordinal; -1: the call runs on the CPU
  void* stream = nullptr;  // the CUstream in which XLA enqueues the work before and after the call
};

// Of a call that runs on a GPU. Throws Failure with `subject`, the operation, in the message.
GpuStream gpu_stream_of(const xla::CallFrame& frame, const std::string& subject);

}  // namespace horoplug::jax
