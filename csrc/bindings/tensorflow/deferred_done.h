// TensorFlow's callback for the end of an asynchronous kernel, kept beyond the kernel's call.
//
// TF_NewAsyncKernelBuilder's kernels are handed the address of a std::function that is destroyed
// when they return, so that nobody can call it later, which is what it is for. Moving the function
// itself out of there is safe as long as it is libstdc++'s, of which this is the layout; a check
// that its pointers point to code tells whether it is.
#pragma once

#include "tf_api.h"

namespace horoplug::tensorflow {

class DeferredDone {
 public:
  DeferredDone() = default;
  // Takes the function away from its owner, who destroys an empty one. can_defer() must be true.
  explicit DeferredDone(TF_AsyncOpKernelDoneCallback* callback);
  ~DeferredDone();
  DeferredDone(DeferredDone&& other) noexcept;
  DeferredDone& operator=(DeferredDone&& other) noexcept;

  // Tells TensorFlow that the kernel has ended; the kernel's context is gone then.
  void operator()();

  // Whether this process's callbacks are of the kind that can be moved. The answer is found once.
  static bool can_defer(TF_AsyncOpKernelDoneCallback* callback);

  // The layout of libstdc++'s std::function<void()>.
  struct Function {
    void* functor[2] = {nullptr, nullptr};  // small ones lie here, of others the address
    bool (*manager)(void* to, const void* from, int operation) = nullptr;
    void (*invoker)(const void* functor) = nullptr;
  };

 private:
  Function function_;
};

}  // namespace horoplug::tensorflow
