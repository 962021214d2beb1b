// TensorFlow's completion callback of an asynchronous kernel, kept after the kernel has returned.
//
// Kernels of TF_NewAsyncKernelBuilder get the address of a std::function that TensorFlow destroys
// when the kernel returns, although its purpose is to be called later. Moving the function out of
// there is safe if it has the layout of libstdc++'s std::function. A check that its pointers point
// to code verifies the layout.
#pragma once

#include "libstdcxx.h"
#include "tf_api.h"

namespace horoplug::tensorflow {

class DeferredDone {
 public:
  DeferredDone() = default;
  // Moves the function out of `callback` and leaves an empty one. Requires can_defer().
  explicit DeferredDone(TF_AsyncOpKernelDoneCallback* callback);
  ~DeferredDone();
  DeferredDone(DeferredDone&& other) noexcept;
  DeferredDone& operator=(DeferredDone&& other) noexcept;

  // Tells TensorFlow that the kernel has ended. Its context must not be used afterwards.
  void operator()();

  // Whether the callbacks of this process have the expected layout. Determined once.
  static bool can_defer(TF_AsyncOpKernelDoneCallback* callback);

 private:
  libstdcxx::Function function_;
};

}  // namespace horoplug::tensorflow
