// Collectives are written as coroutines: straight-line code that gives way wherever it would have
// to wait.
//
// A Task is one coroutine, a Fiber is a stack of them (a collective and what it calls). The engine
// polls its fibers: a fiber whose wait is over runs on until the next wait. Nothing here knows
// threads, clocks or sockets, and a fiber always runs on the thread that polls it.
#pragma once

#include <coroutine>
#include <exception>
#include <utility>
#include <vector>

namespace horoplug {

// What a coroutine can wait for. The engine asks ready() whenever something may have changed.
class Waitable {
 public:
  virtual bool ready() = 0;
  // Called once, when the wait is over; throws if what was waited for has failed.
  virtual void finish() {}
  // Adds the ranks that are waited for, for error messages.
  virtual void blame(std::vector<int>& ranks) const = 0;
  // Nobody says when it may be ready: it is to be asked again and again.
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

  // co_await task: runs it to its end inside the caller's fiber and rethrows what it throws.
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

  // Runs as far as it can. True once the task has ended; throws what the task threw.
  bool poll();
  // Whether the last poll() got past at least one wait.
  bool advanced() const { return advanced_; }
  // The ranks that the current wait is for.
  std::vector<int> blame() const;
  // Whether it has to be asked again and again.
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
      fiber->leaf_ = self;
      fiber->waiting_ = &waitable;
    }
    void await_resume() { waitable.finish(); }
  };

  Task get_return_object() { return Task(Handle::from_promise(*this)); }
  std::suspend_always initial_suspend() noexcept { return {}; }
  Final final_suspend() noexcept { return {}; }
  void return_void() {}
  void unhandled_exception() { failure = std::current_exception(); }

  Wait await_transform(Waitable& waitable) { return {waitable, fiber}; }
  // A temporary waitable lives in the coroutine's frame until the wait is over.
  Wait await_transform(Waitable&& waitable) { return {waitable, fiber}; }
  const Task& await_transform(const Task& task) { return task; }
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
