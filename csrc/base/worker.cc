#include "base/worker.h"

#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>

namespace horoplug {
namespace {

using Clock = std::chrono::steady_clock;

// A thread that has just received a function is likely to receive another one, so it yields before
// it sleeps. Other threads get the processor meanwhile.
constexpr std::chrono::microseconds kLingers{100};
constexpr std::chrono::seconds kLastMoment{1};

}  // namespace

// State shared with the thread, which may outlive the worker.
struct Worker::State {
  const pid_t process = ::getpid();
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Function> functions;
  std::atomic<bool> waiting{false};  // functions are queued, or the worker is ending
  std::thread::id thread;            // set before anything can be posted
  bool closed = false;
  bool done = false;

  void serve();
};

void Worker::State::serve() {
  std::unique_lock lock(mutex);
  while (!functions.empty() || !closed) {
    if (functions.empty()) {
      changed.wait(lock, [this] { return closed || !functions.empty(); });
      continue;
    }
    {
      const Function function = std::move(functions.front());
      functions.pop_front();
      waiting = closed || !functions.empty();
      lock.unlock();
      function();
    }
    const auto until = Clock::now() + kLingers;
    while (!waiting && Clock::now() < until) ::sched_yield();
    lock.lock();
  }
  done = true;
  changed.notify_all();
}

// Detached; `done` replaces a join, since the thread may never end.
Worker::Worker() : state_(std::make_shared<State>()) {
  std::thread thread([state = state_] { state->serve(); });
  state_->thread = thread.get_id();
  thread.detach();
}

Worker::~Worker() {
  if (state_->process != ::getpid()) return;  // after fork(), the thread is the parent's
  std::unique_lock lock(state_->mutex);
  state_->closed = true;
  state_->waiting = true;
  state_->changed.notify_all();
  if (state_->thread == std::this_thread::get_id()) return;
  state_->changed.wait_for(lock, kLastMoment, [this] { return state_->done; });
}

void Worker::post(Function function) {
  const std::lock_guard lock(state_->mutex);
  state_->functions.push_back(std::move(function));
  state_->waiting = true;
  state_->changed.notify_all();
}

bool Worker::run(Function function, Seconds time) {
  if (state_->thread == std::this_thread::get_id()) {
    function();
    return true;
  }
  const auto over = std::make_shared<bool>(false);  // protected by the lock
  post([state = state_, function = std::move(function), over] {
    function();
    const std::lock_guard lock(state->mutex);
    *over = true;
    state->changed.notify_all();
  });
  std::unique_lock lock(state_->mutex);
  return state_->changed.wait_for(lock, time, [&] { return *over; });
}

}  // namespace horoplug
