// Writes trace events (the Chrome trace format, which Perfetto reads) to a file while they happen.
//
// Events are put into a buffer in their binary form; a thread of the timeline's own turns them into
// text and writes them every few milliseconds. If it cannot follow, events are dropped, and the
// trace says how many.
//
// Spans are written when they end, with begin and duration, so that the trace is well-formed
// wherever it stops. What has begun and might never end is marked by an instant.
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

#include "trace/trace_file.h"

namespace horoplug {

using TraceRow = std::uint32_t;

// Names are static texts in lower case; a trace has them in upper case, prefix and name joined:
// "negotiate" and "allreduce" are NEGOTIATE_ALLREDUCE.
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
  double begin = 0;  // trace_clock()
  double end = 0;    // spans
  std::array<Number, 4> numbers;
  const char* algorithm = nullptr;
  Text text;
};

class Timeline {
 public:
  struct Options {
    bool mark_cycles = false;
    std::size_t max_events = 1 << 17;  // that wait to be written
    std::chrono::milliseconds interval{20};
  };
  // Told once, from the writing thread, why nothing more is written.
  using OnFailure = std::function<void(const std::string&)>;

  // Opens the file. Throws Error.
  Timeline(const std::string& path, Options options, OnFailure on_failure);
  ~Timeline();
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  // Empties the file and starts to write. Throws Error.
  void begin();
  // Writes what there is and ends. What is added later is ignored. From any thread, repeatedly.
  void close();

  // A new row with a title. Rows with a smaller `order` are shown above others.
  TraceRow add_row(std::string title, int order = 0);
  void add(TraceEvent event);

  bool mark_cycles() const { return options_.mark_cycles; }
  // When it began; earlier times count as this one.
  double origin() const { return origin_; }

 private:
  struct Row {
    TraceRow number;
    int order;
    std::string title;
  };

  void run();
  // Writes what has been added until now; called with the lock, which it gives up meanwhile.
  void flush(std::unique_lock<std::mutex>& lock);
  std::string head() const;
  void write(const Row& row);
  void write(const TraceEvent& event);
  std::int64_t nanoseconds(double time) const;

  const Options options_;
  const OnFailure on_failure_;
  TraceFile file_;
  double origin_ = 0;
  std::int64_t started_at_ = 0;  // microseconds since 1970

  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<TraceEvent> events_;
  std::vector<Row> rows_;
  TraceRow row_count_ = 0;
  std::uint64_t dropped_ = 0;
  bool closing_ = true;

  std::mutex closing_mutex_;
  // The writing thread's own.
  std::vector<TraceEvent> writing_;
  std::string json_;
  std::thread thread_;
};

}  // namespace horoplug
