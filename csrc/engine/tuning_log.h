// Tells users the results of the tuner: in the log, and in a CSV file with a line for each value
// that was tried. A thread of its own writes the file, so that the progress loop waits for no disk.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "base/log.h"
#include "base/worker.h"
#include "controller/plans/tuner.h"

namespace horoplug {

class TuningLog {
 public:
  // An empty path: no file. Throws Error if it cannot be written.
  TuningLog(const std::string& path, const Log& log);
  // Returns when the file is complete.
  ~TuningLog();
  TuningLog(const TuningLog&) = delete;
  TuningLog& operator=(const TuningLog&) = delete;

  void write(std::uint32_t set, const Trial& trial);

 private:
  // Nothing more is written after the first failure, such as a full disk.
  void append(std::string_view text);

  const Log log_;
  int fd_ = -1;  // used by the writer
  std::unique_ptr<Worker> writer_;
};

}  // namespace horoplug
