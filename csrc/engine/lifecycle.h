// The states of an engine, from its start to its end.
#pragma once

#include <condition_variable>
#include <mutex>
#include <utility>

#include "base/status.h"

namespace horoplug {

class Lifecycle {
 public:
  enum class State {
    kStarting,  // not every peer has introduced itself
    kRunning,
    kLeaving,  // this rank shuts down, in agreement with its peers
    kStopped,  // well or badly
  };

  // ---- the thread that runs the loop

  State state() const { return state_; }
  bool starting() const { return state_ == State::kStarting; }
  bool stopped() const { return state_ == State::kStopped; }
  void enter(State state) {
    {
      std::lock_guard lock(mutex_);
      state_ = state;
    }
    changed_.notify_all();
  }

  // The job has failed. The engine stops soon.
  void note_failure(Status failure) {
    std::lock_guard lock(mutex_);
    failure_ = std::move(failure);
  }

  // This rank leaves as soon as the job has started.
  void request_leave() { leave_requested_ = true; }
  bool leave_requested() const { return leave_requested_; }

  // ---- any other thread

  // Returns when the start is over; not ok if the job has failed, even after the start.
  Status await_start() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return state_ != State::kStarting; });
    return state_ == State::kStopped ? failure_ : Status{};
  }
  void await_stop() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return state_ == State::kStopped; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  State state_ = State::kStarting;  // written under the lock, by the thread that runs the loop
  Status failure_;                  // under the lock
  bool leave_requested_ = false;    // used by the thread that runs the loop
};

}  // namespace horoplug
