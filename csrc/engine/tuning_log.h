// Tells users the results of the tuner: in the log, and in a CSV file with a line for each value
// that was tried.
#pragma once

#include <fstream>
#include <string>

#include "base/log.h"
#include "controller/plans/tuner.h"

namespace horoplug {

class TuningLog {
 public:
  // An empty path: no file. Throws Error if it cannot be written.
  TuningLog(const std::string& path, const Log& log);

  void write(std::uint32_t set, const Trial& trial);

 private:
  const Log log_;
  std::ofstream file_;
};

}  // namespace horoplug
