// Eager calls: operations outside of compiled programs on arrays in GPU memory. XLA runs each as a
// program of its own, in the order of its stream, and Python waits on the host until the handler
// has returned. The record of an eager call gives Python the failure as the core reports it. For
// operations whose output shapes depend on the other ranks it holds the row counts, and the results
// until a second program copies them to XLA's arrays.
//
// Compiled programs contain the number of the record. Numbers are small and are used again.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "../common/engine_slot.h"
#include "ffi_frame.h"

namespace horoplug::jax {

// An operation that has ended. The core keeps its results until this object is destroyed.
class CompletedOperation {
 public:
  CompletedOperation() = default;
  CompletedOperation(bindings::EngineSlot::Lease lease, hp_handle handle)
      : lease_(std::move(lease)), handle_(handle) {}
  ~CompletedOperation() {
    if (handle_ != 0) hp_release(lease_->engine, handle_);
  }
  CompletedOperation(CompletedOperation&& other) noexcept
      : lease_(std::move(other.lease_)), handle_(std::exchange(other.handle_, 0)) {}
  CompletedOperation& operator=(CompletedOperation&& other) noexcept {
    std::swap(lease_, other.lease_);
    std::swap(handle_, other.handle_);
    return *this;
  }

  hp_engine* engine() const { return lease_->engine; }
  hp_handle handle() const { return handle_; }
  // The result of tensor `index`. Throws Failure.
  hp_tensor_result result(std::size_t index) const;

 private:
  bindings::EngineSlot::Lease lease_;
  hp_handle handle_ = 0;
};

class EagerCalls {
 public:
  // Parameters that are not in the compiled program, so that one program serves all of them.
  struct Request {
    std::string name;
    std::vector<std::int64_t> splits;
  };

  // ---- called by Python ----

  void open(std::int32_t number, Request request);
  // Waits until `handlers` handlers have returned; false after `seconds`.
  bool await(std::int32_t number, int handlers, double seconds);
  // The status of the operation, and the text of its failure, which is valid until close().
  hp_status failure(std::int32_t number, const char** reason);
  // The rows of a tensor that each rank has sent. Valid until close().
  const std::vector<std::int64_t>& row_counts(std::int32_t number, std::size_t tensor);
  // Removes the record. Returns false if fewer than `handlers` handlers have returned: the record
  // is then removed when they have, and the number must not be used again.
  bool close(std::int32_t number, int handlers);

  // ---- called by handlers; they throw Failure if Python has not opened the number ----

  Request request(std::int32_t number);
  void keep(std::int32_t number, CompletedOperation operation,
            std::vector<std::vector<std::int64_t>> row_counts);
  CompletedOperation take(std::int32_t number);
  // A handler has returned. `failure` is null if it was successful.
  void end(std::int32_t number, const Failure* failure);

 private:
  struct Record {
    Request request;
    CompletedOperation kept;
    std::vector<std::vector<std::int64_t>> row_counts;
    hp_status status = HP_OK;
    std::string reason;
    int ended = 0;          // handlers that have returned
    int remove_after = -1;  // so many handlers have returned; -1: the record is open
  };
  Record& at(std::int32_t number);

  std::mutex mutex_;
  std::condition_variable ended_;
  std::map<std::int32_t, Record> records_;
};

// Those of this process. Never destroyed, because XLA's threads may run until the process ends.
EagerCalls& eager_calls();

}  // namespace horoplug::jax
