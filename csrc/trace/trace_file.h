// A file that is a JSON array of trace events at every moment, so that it can be read while it
// grows and after the process was killed.
//
// The kernel cuts a write short between two pages when the process is killed, so that no write that
// matters may be longer than a page. Therefore the file ends with blanks and the closing bracket,
// and events are written over the blanks, each within one page. A mixture of old and new pages, as
// a reader may see it, is valid as well. When the blanks are used up, more are appended (which JSON
// allows) and the bracket moves behind them. That is two writes of one byte, the only moment at
// which a kill would do harm, and is made rare: the blanks double each time.
//
// Since the blanks are really written, a full disk is met there and not in the midst of events.
#pragma once

#include <sys/types.h>

#include <string>
#include <string_view>

namespace horoplug {

class TraceFile {
 public:
  // Opens or creates the file and leaves its content alone. Failures are Errors of one line, here
  // and below; the file is valid then.
  explicit TraceFile(std::string path);
  ~TraceFile();
  TraceFile(const TraceFile&) = delete;
  TraceFile& operator=(const TraceFile&) = delete;

  // Events are JSON objects of less than kMaxEvent bytes; longer ones are left out.
  static constexpr std::size_t kMaxEvent = 4000;

  // Replaces the content by this event.
  void begin(std::string_view event);
  void add(std::string_view event);
  // Writes what was added since the last time.
  void flush();
  // Flushes and takes the blanks away.
  void finish();

 private:
  [[noreturn]] void fail(int error) const;
  // The errno of what went wrong, or 0.
  int write_at(off_t at, std::string_view text) const;
  void extend();

  const std::string path_;
  int fd_ = -1;
  std::string pending_;  // to be written at end_, within one page
  off_t end_ = 0;        // of the events
  off_t size_ = 0;       // of the file; its last two bytes are "\n]"
};

}  // namespace horoplug
