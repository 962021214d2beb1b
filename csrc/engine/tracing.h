// Reports what happens to operations to the timeline, if one is being written.
//
// Any thread starts and stops the timeline. Everything else is used by the thread that runs the
// loop; without a timeline it costs a read of an atomic counter and of a pointer.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/log.h"
#include "controller/messages/messages.h"
#include "engine/execution/process_set.h"
#include "engine/operations/operation.h"
#include "trace/batch_trace.h"
#include "trace/timeline.h"

namespace horoplug {

class Tracing {
 public:
  // Rank 0 alone writes; on the others starting and stopping do nothing.
  Tracing(int rank, Log log) : writes_(rank == 0), log_(std::move(log)) {}
  ~Tracing() { stop(); }
  Tracing(const Tracing&) = delete;
  Tracing& operator=(const Tracing&) = delete;

  // Completes the current timeline and begins a new one. Throws Error and changes nothing if the
  // file cannot be opened.
  void start(const std::string& path, bool mark_cycles);
  // Returns when the file is complete.
  void stop();

  // This rank's negotiator has returned decisions.
  void cycle(const ProcessSet& set, std::size_t decisions) {
    if (decisions > 0 && on()) write_cycle(set);
  }
  void submitted(const Operation& operation) {
    if (on()) write_submitted(operation);
  }
  // A child of the root is ready, with all ranks of its subtree, as its message says.
  void ready(const ProcessSet& set, int child, const Ready& ready) {
    if (on()) write_ready(set, child, ready);
  }
  // A batch was decided; it carries its trace from here on.
  void decided(const ProcessSet& set, Batch& batch) {
    if (on()) attach(set, batch);
  }
  void ended(std::span<const OperationPtr> operations, const Status& status) {
    if (on()) write_end(operations, status);
  }

 private:
  bool on() {
    if (changes_.load(std::memory_order_acquire) != changes_seen_) take_over();
    return timeline_ != nullptr;
  }
  void take_over();
  // Makes it the current timeline; returns the one before.
  std::shared_ptr<Timeline> replace(std::shared_ptr<Timeline> timeline);

  void write_cycle(const ProcessSet& set);
  void write_submitted(const Operation& operation);
  void write_ready(const ProcessSet& set, int child, const Ready& ready);
  void attach(const ProcessSet& set, Batch& batch);
  void write_end(std::span<const OperationPtr> operations, const Status& status);

  // The row of a tensor. The number of rows is limited: once it is reached, new names share rows,
  // one name at a time.
  struct RowLease {
    TraceRow row = 0;
    SteadyTime since;         // when the name got this row, if it is shared
    TraceEvent::Text tensor;  // its name then, for the events
  };
  RowLease row_of(std::uint32_t set, const std::string& name);
  void give_back_row(std::uint32_t set, const std::string& name);
  TraceRow batch_row(std::uint32_t set);

  const bool writes_;
  const Log log_;

  // Used by any thread. The first is held while files are opened and completed; the loop takes only
  // the second, which nothing holds for long.
  std::mutex changing_;
  std::mutex mutex_;
  std::shared_ptr<Timeline> current_;
  std::atomic<std::uint64_t> changes_{0};

  // Used by the thread that runs the loop.
  std::uint64_t changes_seen_ = 0;
  std::shared_ptr<Timeline> timeline_;
  TraceRow cycle_row_ = 0;
  std::map<std::uint32_t, TraceRow> batch_rows_;
  std::unordered_map<std::string, TraceRow> rows_;
  std::unordered_map<std::string, RowLease> leased_rows_;
  std::vector<TraceRow> spare_rows_;
  std::unordered_set<const Operation*> undecided_;
};

}  // namespace horoplug
