// What the engine tells its timeline, if one is being written.
//
// The timeline is started and stopped from any thread; everything else belongs to the progress
// thread and costs a look at an atomic counter and a pointer while there is no timeline.
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
#include "controller/messages.h"
#include "engine/operation.h"
#include "engine/process_set.h"
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

  // In place of the current timeline, which is completed. Throws Error and changes nothing if the
  // file cannot be opened.
  void start(const std::string& path, bool mark_cycles);
  // Returns when the file is complete.
  void stop();

  // A negotiation on this rank has come to decisions.
  void cycle(const ProcessSet& set, std::size_t decisions) {
    if (decisions > 0 && on()) write_cycle(set);
  }
  void submitted(const Operation& operation) {
    if (on()) write_submitted(operation);
  }
  // A child of the root is ready, with all ranks of its subtree.
  void ready(const ProcessSet& set, int child, const Ready& ready) {
    if (on()) write_ready(set, child, ready);
  }
  // A batch has been decided on; it carries its trace from here on.
  void decided(const ProcessSet& set, Batch& batch) {
    if (on()) attach(set, batch);
  }
  // A batch has ended, well or badly.
  void ended(const Batch& batch) {
    if (batch.trace) batch.trace->end();
  }
  void ended(const std::vector<OperationPtr>& operations, const Status& status) {
    if (on()) write_end(operations, status);
  }

 private:
  bool on() {
    if (changes_.load(std::memory_order_acquire) != changes_seen_) take_over();
    return timeline_ != nullptr;
  }
  void take_over();

  void write_cycle(const ProcessSet& set);
  void write_submitted(const Operation& operation);
  void write_ready(const ProcessSet& set, int child, const Ready& ready);
  void attach(const ProcessSet& set, Batch& batch);
  void write_end(const std::vector<OperationPtr>& operations, const Status& status);

  // A tensor's row. So that endless new names do not make endless rows, after many of them names
  // share rows, one at a time.
  struct Place {
    TraceRow row = 0;
    double since = 0;         // when it was given this row, if it is a shared one
    TraceEvent::Text tensor;  // its name then, for the events
  };
  Place place_of(std::uint32_t set, const std::string& name);
  void give_back_row(std::uint32_t set, const std::string& name);
  TraceRow batch_row(std::uint32_t set);

  const bool writes_;
  const Log log_;

  // Shared between threads.
  std::mutex mutex_;
  std::shared_ptr<Timeline> current_;
  std::atomic<std::uint64_t> changes_{0};

  // The progress thread's own.
  std::uint64_t changes_seen_ = 0;
  std::shared_ptr<Timeline> timeline_;
  TraceRow cycle_row_ = 0;
  std::map<std::uint32_t, TraceRow> batch_rows_;
  std::unordered_map<std::string, TraceRow> rows_;
  std::unordered_map<std::string, Place> lent_rows_;
  std::vector<TraceRow> spare_rows_;
  std::unordered_set<const Operation*> undecided_;
};

}  // namespace horoplug
