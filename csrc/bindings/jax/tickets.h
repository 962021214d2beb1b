// Operations outside of compiled programs, on arrays of a card. XLA runs each as a program of its
// own, in the order of its stream, and Python waits, on the host, for the handler alone: it has the
// failure as the core gives it, and for operations whose outputs' shapes follow from the other
// ranks, the numbers of rows, before it has another program bring the results to arrays of XLA's.
//
// A ticket is what Python and the handlers of one operation know each other by: a small number,
// which compiled programs contain and which is used again.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "../common/job.h"
#include "call.h"

namespace horoplug::jax {

// An operation that has ended, with its results, which the core has until this is gone.
class Ended {
 public:
  Ended() = default;
  Ended(bindings::Job::Loan job, hp_handle handle) : job_(std::move(job)), handle_(handle) {}
  ~Ended() {
    if (handle_ != 0) hp_release(job_->engine, handle_);
  }
  Ended(Ended&& other) noexcept
      : job_(std::move(other.job_)), handle_(std::exchange(other.handle_, 0)) {}
  Ended& operator=(Ended&& other) noexcept {
    std::swap(job_, other.job_);
    std::swap(handle_, other.handle_);
    return *this;
  }

  hp_engine* engine() const { return job_->engine; }
  hp_handle handle() const { return handle_; }
  // Of tensor `index`. Throws Failure.
  hp_tensor_result result(std::size_t index) const;

 private:
  bindings::Job::Loan job_;
  hp_handle handle_ = 0;
};

class Tickets {
 public:
  // What a compiled program does not contain, so that it serves for all names.
  struct Request {
    std::string name;
    std::vector<std::int64_t> splits;
  };

  // ---- called by Python ----

  void open(std::int32_t number, Request request);
  // Waits until so many handlers have ended; false if they have not after `seconds`.
  bool await(std::int32_t number, int handlers, double seconds);
  // How it has failed; HP_OK if it has not. The text is the ticket's.
  hp_status failure(std::int32_t number, const char** reason);
  // Of a tensor, from each rank. The vector is the ticket's.
  const std::vector<std::int64_t>& row_counts(std::int32_t number, std::size_t tensor);
  // Forgets it; false if not so many handlers have ended: it is forgotten when they have, and the
  // number not free.
  bool close(std::int32_t number, int handlers);

  // ---- called by handlers; they throw Failure if Python has opened no such ticket ----

  Request request(std::int32_t number);
  void keep(std::int32_t number, Ended operation,
            std::vector<std::vector<std::int64_t>> row_counts);
  Ended take(std::int32_t number);
  // A handler has ended, with `failure` or, if that is null, well.
  void end(std::int32_t number, const Failure* failure);

 private:
  struct Ticket {
    Request request;
    Ended kept;
    std::vector<std::vector<std::int64_t>> row_counts;
    hp_status status = HP_OK;
    std::string reason;
    int ended = 0;
    int forget_after = -1;  // handlers
  };
  Ticket& at(std::int32_t number);

  std::mutex mutex_;
  std::condition_variable ended_;
  std::map<std::int32_t, Ticket> tickets_;
};

// The process's. Never destroyed, as XLA's threads may outlive everything.
Tickets& tickets();

}  // namespace horoplug::jax
