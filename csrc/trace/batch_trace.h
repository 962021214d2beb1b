// The timeline of one batch: its spans appear on the row of its process set and on the row of each
// of its tensors.
//
// Packing and unpacking are recorded chunk by chunk. The transfer span covers the time between
// them: data transfer, reduction, and waiting for other ranks.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/time.h"
#include "trace/timeline.h"

namespace horoplug {

class BatchTrace {
 public:
  struct Member {
    TraceRow row;
    std::size_t tensors;      // number of tensors in the batch
    TraceEvent::Text tensor;  // the tensor's name, if the row's title does not give it
  };
  struct Batch {
    const char* operation;  // static; lower case
    std::int64_t plan;
    std::int64_t number;
    std::int64_t bytes;
    TraceRow row;
    std::vector<Member> members;
  };
  enum class Copy : std::uint8_t { kIn, kOut };

  // The batch is queued from now on.
  BatchTrace(std::shared_ptr<Timeline> timeline, Batch batch);

  // The batch runs from now on; writes an event at once.
  void start();
  // An algorithm runs from now on until the next call of end_transfer(). All texts are static.
  void begin_transfer(const char* medium, const char* algorithm, std::size_t bytes);
  void end_transfer() { transfers_.back().end = steady_now(); }
  // A part of the batch's n-th tensor was packed or unpacked; the copy ends now.
  void add_copy(Copy kind, std::size_t tensor, SteadyTime begin);
  // The batch ends now, successfully or not: writes all spans.
  void end();

 private:
  struct CopySpan {
    Copy kind;
    std::size_t tensor;
    SteadyTime begin;
    SteadyTime end;
  };
  struct Transfer {
    const char* medium;
    const char* algorithm;
    std::int64_t bytes;
    SteadyTime begin;
    SteadyTime end;
  };

  std::size_t member_of(std::size_t tensor) const;
  TraceEvent span(TraceRow row, const char* name, SteadyTime begin, SteadyTime end) const;
  void write_inside(TraceRow row, std::span<const CopySpan> copies, bool one_member);
  void write_transfer(TraceRow row, const Transfer& transfer, SteadyTime begin, SteadyTime end);

  const std::shared_ptr<Timeline> timeline_;
  const Batch batch_;
  std::vector<std::size_t> first_tensor_;  // by member
  const SteadyTime decided_ = steady_now();
  std::optional<SteadyTime> started_;
  std::vector<Transfer> transfers_;
  std::vector<CopySpan> copies_;
};

// Records the duration of a copy. Without a trace it costs one comparison.
class CopyTimer {
 public:
  CopyTimer(BatchTrace* trace, BatchTrace::Copy kind, std::size_t tensor)
      : trace_(trace),
        kind_(kind),
        tensor_(tensor),
        begin_(trace != nullptr ? steady_now() : SteadyTime{}) {}
  ~CopyTimer() {
    if (trace_ != nullptr) trace_->add_copy(kind_, tensor_, begin_);
  }
  CopyTimer(const CopyTimer&) = delete;
  CopyTimer& operator=(const CopyTimer&) = delete;

 private:
  BatchTrace* const trace_;
  const BatchTrace::Copy kind_;
  const std::size_t tensor_;
  const SteadyTime begin_;
};

}  // namespace horoplug
