// Writes trace events in the Chrome trace format, which Perfetto reads, while they happen.
//
// Events are queued in binary form. A thread of the timeline formats and writes them every few
// milliseconds. If it cannot keep up, events are dropped, and the trace contains their number.
//
// A span is written when it ends, with its begin and duration, so that the trace is well-formed
// wherever it stops. An instant event marks the begin of a span that might never end.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/time.h"
#include "trace/trace_file.h"

namespace horoplug {

using TraceRow = std::uint32_t;

// Names are static texts in lower case. The trace shows prefix and name joined in upper case:
// "negotiate" and "allreduce" become NEGOTIATE_ALLREDUCE.
struct TraceEvent {
  struct Number {
    const char* key = nullptr;  // nullptr: absent
    std::int64_t value = 0;
  };
  struct Text {
    const char* key = nullptr;
    std::string value;
  };

  enum class Kind : std::uint8_t { kSpan, kInstant };
  Kind kind = Kind::kInstant;
  TraceRow row = 0;
  const char* prefix = nullptr;
  const char* name = nullptr;
  SteadyTime begin;
  SteadyTime end;  // of spans
  std::array<Number, 4> numbers;
  const char* algorithm = nullptr;
  Text text;
};

class Timeline {
 public:
  struct Options {
    bool mark_cycles = false;
    std::size_t max_events = 1 << 17;  // limit of the queue
    std::chrono::milliseconds interval{20};
  };
  // Called once, on the writing thread, with the reason why no more events are written.
  using OnFailure = std::function<void(const std::string&)>;

  // Opens the file. Throws Error.
  Timeline(const std::string& path, Options options, OnFailure on_failure);
  ~Timeline();
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  // Truncates the file and starts writing. Throws Error.
  void begin();
  // Writes the queued events and stops. Later events are ignored. May be called repeatedly, by any
  // thread.
  void close();

  // Adds a row with a title. Rows with a smaller `order` are shown above the others.
  TraceRow add_row(std::string title, int order = 0);
  void add(TraceEvent event);

  bool mark_cycles() const { return options_.mark_cycles; }
  // The start of the trace; earlier times are clamped to it.
  SteadyTime origin() const { return origin_; }

 private:
  struct Row {
    TraceRow number;
    int order;
    std::string title;
  };

  void run();
  // Writes the queued events. Called with the lock held, which it releases while it writes.
  void flush(std::unique_lock<std::mutex>& lock);
  std::string head() const;
  void write(const Row& row);
  void write(const TraceEvent& event);
  std::int64_t nanoseconds(SteadyTime time) const;

  const Options options_;
  const OnFailure on_failure_;
  TraceFile file_;
  SteadyTime origin_;
  std::int64_t started_at_ = 0;  // microseconds since 1970

  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<TraceEvent> events_;
  std::vector<Row> rows_;
  TraceRow row_count_ = 0;
  std::uint64_t dropped_ = 0;
  bool closing_ = true;

  std::mutex closing_mutex_;
  // Used by the writing thread only.
  std::vector<TraceEvent> writing_;
  std::string json_;
  std::thread thread_;
};

}  // namespace horoplug
