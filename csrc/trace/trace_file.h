// A file that is a valid JSON array of trace events at every moment, so that it can be read while
// it grows and after the process was killed.
//
// The kernel cuts a write short at a page boundary when the process is killed, so every write that
// matters stays within one page. The file therefore ends with blanks and the closing bracket, and
// events overwrite the blanks, each within one page. A reader that sees a mixture of old and new
// pages still reads valid JSON. When the blanks are used up, more are appended, which JSON allows,
// and the bracket moves behind them. These are two writes of one byte, the only moment at which a
// kill would corrupt the file. The number of blanks doubles each time, so that this moment is rare.
//
// The blanks are really written, so a full disk is detected there and not within an event.
#pragma once

#include <sys/types.h>

#include <string>
#include <string_view>

namespace horoplug {

class TraceFile {
 public:
  // Opens or creates the file and keeps its content. Failures here and below are Errors of one
  // line, which leave the file valid.
  explicit TraceFile(std::string path);
  ~TraceFile();
  TraceFile(const TraceFile&) = delete;
  TraceFile& operator=(const TraceFile&) = delete;

  // Events are JSON objects of less than kMaxEvent bytes. Longer ones are dropped.
  static constexpr std::size_t kMaxEvent = 4000;

  // Replaces the content with this event.
  void begin(std::string_view event);
  void add(std::string_view event);
  // Writes the events that were added since the last flush.
  void flush();
  // Flushes and removes the blanks.
  void finish();

 private:
  [[noreturn]] void fail(int error) const;
  // The errno of the last failure, or 0.
  int write_at(off_t at, std::string_view text) const;
  void extend();

  const std::string path_;
  const int fd_;
  std::string pending_;  // to be written at end_, within one page
  off_t end_ = 0;        // end of the events
  off_t size_ = 0;       // size of the file; its last two bytes are "\n]"
};

}  // namespace horoplug
