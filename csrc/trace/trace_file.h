// A file that is a JSON array of trace events at every moment, so that it can be read while it
// grows and after the process was killed.
//
// Each addition is one write that begins at the closing bracket and ends with a new one. If a write
// fails, the bracket is put back.
#pragma once

#include <sys/types.h>

#include <string>
#include <string_view>

namespace horoplug {

class TraceFile {
 public:
  // Opens or creates the file and leaves its content alone. Failures are Errors of one line, here
  // and below.
  explicit TraceFile(std::string path);
  ~TraceFile();
  TraceFile(const TraceFile&) = delete;
  TraceFile& operator=(const TraceFile&) = delete;

  // Replaces the content by these events: "{…},\n{…}", at least one.
  void begin(std::string_view events);
  void append(std::string_view events);

 private:
  [[noreturn]] void fail(int error) const;
  // The errno of what went wrong, or 0.
  int write_at(off_t at, std::string_view text) const;

  const std::string path_;
  int fd_ = -1;
  off_t end_ = 0;  // where the closing bracket's line ends the events
};

}  // namespace horoplug
