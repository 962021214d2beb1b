// Collectives are coroutines: straight-line code that suspends wherever it would have to wait.
//
// A Task is one coroutine. A Fiber is a stack of tasks: a collective and the tasks that it calls.
// The engine polls its fibers; a fiber whose wait has ended runs until its next wait. This file
// knows no threads, clocks or sockets. A fiber always runs on the thread that polls it.
#pragma once

#include <coroutine>
#include <cstddef>
#include <exception>
#include <utility>
#include <vector>

#include "base/frame_memory.h"

namespace horoplug {

// A condition that a coroutine can wait for. The engine calls ready() whenever the condition may
// have changed.
class Waitable {
 public:
  virtual bool ready() = 0;
  // Called once, when the wait has ended. Throws if the operation that was waited for has failed.
  virtual void finish() {}
  // Adds the ranks that this wait depends on, for error messages.
  virtual void blame(std::vector<int>& ranks) const = 0;
  // True if no event announces readiness, so that ready() must be polled.
  virtual bool polled() const { return false; }

 protected:
  ~Waitable() = default;
};

class Fiber;

class [[nodiscard]] Task {
 public:
  struct promise_type;
  using Handle = std::coroutine_handle<promise_type>;

  Task(Task&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Task& operator=(Task&&) = delete;
  ~Task() {
    if (handle_) handle_.destroy();
  }

  // co_await task: runs the task to its end inside the caller's fiber, and rethrows its exception.
  struct Awaiter;
  Awaiter operator co_await() const;

 private:
  friend class Fiber;
  explicit Task(Handle handle) : handle_(handle) {}
  Handle handle_;
};

class Fiber {
 public:
  explicit Fiber(Task task);
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Runs until the next wait. Returns true once the task has ended. Throws what the task threw.
  bool poll();
  // Whether the last poll() passed at least one wait.
  bool advanced() const { return advanced_; }
  // The ranks that the current wait depends on.
  std::vector<int> blame() const;
  // Whether the current wait must be polled.
  bool polled() const { return waiting_ != nullptr && waiting_->polled(); }

 private:
  friend class Task;
  Task task_;
  std::coroutine_handle<> leaf_;
  Waitable* waiting_ = nullptr;
  bool advanced_ = false;
};

struct Task::promise_type {
  Fiber* fiber = nullptr;
  std::coroutine_handle<> caller;
  std::exception_ptr failure;

  struct Final {
    bool await_ready() noexcept { return false; }
    std::coroutine_handle<> await_suspend(Handle ended) noexcept {
      auto caller = ended.promise().caller;
      return caller ? caller : std::noop_coroutine();
    }
    void await_resume() noexcept {}
  };

  struct Wait {
    Waitable& waitable;
    Fiber*& fiber;
    bool await_ready() { return waitable.ready(); }
    void await_suspend(std::coroutine_handle<> self) {
      fiber->leaf_ = self;  // NOLINT(*CallAndMessage): clang does not see that a caller sets it
      fiber->waiting_ = &waitable;
    }
    void await_resume() { waitable.finish(); }
  };

  // The memory of the frame, by the arguments of the coroutine. Always inlined, because GCC takes
  // `delete` for the counterpart of another function than this template (-Wmismatched-new-delete).
  template <HasFrameMemory First, typename... Rest>
  [[gnu::always_inline]] static void* operator new(std::size_t bytes, First& first, Rest&...) {
    return first.frame_memory().take(bytes);
  }
  static void* operator new(std::size_t bytes) { return FrameMemory::take_elsewhere(bytes); }
  static void operator delete(void* frame, std::size_t bytes) { FrameMemory::give(frame, bytes); }

  Task get_return_object() { return Task(Handle::from_promise(*this)); }
  std::suspend_always initial_suspend() noexcept { return {}; }
  Final final_suspend() noexcept { return {}; }
  void return_void() {}
  void unhandled_exception() { failure = std::current_exception(); }

  Wait await_transform(Waitable& waitable) { return {waitable, fiber}; }
  // A temporary argument lives in the coroutine's frame until its wait has ended.
  Wait await_transform(Waitable&& waitable) { return {waitable, fiber}; }
  const Task& await_transform(const Task& task) { return task; }  // NOLINT(*-parameter): as above
};

struct Task::Awaiter {
  Handle callee;
  bool await_ready() const noexcept { return false; }
  Handle await_suspend(Handle caller) const noexcept {
    callee.promise().fiber = caller.promise().fiber;
    callee.promise().caller = caller;
    return callee;
  }
  void await_resume() const {
    if (callee.promise().failure) std::rethrow_exception(callee.promise().failure);
  }
};

inline Task::Awaiter Task::operator co_await() const { return {handle_}; }

inline Fiber::Fiber(Task task) : task_(std::move(task)), leaf_(task_.handle_) {
  task_.handle_.promise().fiber = this;
}

inline bool Fiber::poll() {
  advanced_ = false;
  while (!task_.handle_.done()) {
    if (waiting_ != nullptr) {
      if (!waiting_->ready()) return false;
      waiting_ = nullptr;
    }
    advanced_ = true;
    leaf_.resume();
  }
  if (task_.handle_.promise().failure) std::rethrow_exception(task_.handle_.promise().failure);
  return true;
}

inline std::vector<int> Fiber::blame() const {
  std::vector<int> ranks;
  if (waiting_ != nullptr) waiting_->blame(ranks);
  return ranks;
}

}  // namespace horoplug
