// What happened when inside one batch, and how a timeline shows it: on the row of the batch's
// process set, and on the row of every tensor in it.
//
// Packing and unpacking are known piece by piece. The transfer is what lies between: bytes on their
// way, reduction, and waiting for the other ranks.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "trace/clock.h"
#include "trace/timeline.h"

namespace horoplug {

class BatchTrace {
 public:
  struct Member {
    TraceRow row;
    std::size_t tensors;      // that it brings to the batch
    TraceEvent::Text tensor;  // its name, if the row's title does not tell
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

  // From now on it waits for its turn.
  BatchTrace(std::shared_ptr<Timeline> timeline, Batch batch);

  // It runs from now on, and tells so at once.
  void start();
  // One algorithm runs from now on until the next call of end_transfer(). All texts are static.
  void begin_transfer(const char* medium, const char* algorithm, std::size_t bytes);
  void end_transfer() { transfers_.back().end = trace_clock(); }
  // A part of the batch's n-th tensor was packed or unpacked until now.
  void add_copy(Copy kind, std::size_t tensor, double begin);
  // It ends now, well or badly: writes everything.
  void end();

 private:
  struct CopySpan {
    Copy kind;
    std::size_t tensor;
    double begin;
    double end;
  };
  struct Transfer {
    const char* medium;
    const char* algorithm;
    std::int64_t bytes;
    double begin;
    double end;
  };

  std::size_t member_of(std::size_t tensor) const;
  TraceEvent span(TraceRow row, const char* name, double begin, double end) const;
  void write_inside(TraceRow row, std::span<const CopySpan> copies, bool one_member);
  void write_transfer(TraceRow row, const Transfer& transfer, double begin, double end);

  const std::shared_ptr<Timeline> timeline_;
  const Batch batch_;
  std::vector<std::size_t> first_tensor_;  // of every member
  const double decided_ = trace_clock();
  double started_ = 0;  // 0: not yet
  std::vector<Transfer> transfers_;
  std::vector<CopySpan> copies_;
};

// While a copy lasts. Without a trace it costs a comparison.
class CopyTimer {
 public:
  CopyTimer(BatchTrace* trace, BatchTrace::Copy kind, std::size_t tensor)
      : trace_(trace), kind_(kind), tensor_(tensor), begin_(trace != nullptr ? trace_clock() : 0) {}
  ~CopyTimer() {
    if (trace_ != nullptr) trace_->add_copy(kind_, tensor_, begin_);
  }
  CopyTimer(const CopyTimer&) = delete;
  CopyTimer& operator=(const CopyTimer&) = delete;

 private:
  BatchTrace* const trace_;
  const BatchTrace::Copy kind_;
  const std::size_t tensor_;
  const double begin_;
};

}  // namespace horoplug
