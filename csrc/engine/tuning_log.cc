#include "engine/tuning_log.h"

#include <cerrno>
#include <cstring>
#include <sstream>

#include "base/status.h"

namespace horoplug {
namespace {

std::string milliseconds(double seconds) {
  std::ostringstream text;
  text.precision(4);
  text << seconds * 1e3;
  return text.str();
}

std::string summary(const Trial& trial) {
  const std::string setting = trial.setting;
  if (trial.given_up) return setting + " stays as it was: no plan has lasted long enough";
  const Trial::Choice& before = trial.choices.front();
  const Trial::Choice& after = trial.choices[trial.chosen];
  if (trial.chosen == 0) {
    return setting + " stays " + std::to_string(before.value) + ": of " +
           std::to_string(trial.choices.size()) + " values none is clearly faster than " +
           milliseconds(before.seconds) + " ms a step";
  }
  return setting + " is " + std::to_string(after.value) + " now instead of " +
         std::to_string(before.value) + ": " + milliseconds(after.seconds) + " instead of " +
         milliseconds(before.seconds) + " ms a step";
}

}  // namespace

TuningLog::TuningLog(const std::string& path, const Log& log) : log_(log) {
  if (path.empty()) return;
  file_.open(path, std::ios::trunc);
  if (!file_) {
    throw Error(HP_INVALID_ARGUMENT, "the log of the autotuner cannot be written to '" + path +
                                         "' (HOROVOD_AUTOTUNE_LOG): " + std::strerror(errno));
  }
  file_ << "process_set,setting,value,steps,median_step_ms,chosen\n" << std::flush;
}

void TuningLog::write(std::uint32_t set, const Trial& trial) {
  log_(LogLevel::kInfo, "autotune, process set " + std::to_string(set) + ": " + summary(trial));
  if (!file_.is_open()) return;
  for (std::size_t i = 0; i < trial.choices.size(); ++i) {
    const Trial::Choice& choice = trial.choices[i];
    file_ << set << ',' << trial.setting << ',' << choice.value << ',' << trial.turns << ','
          << milliseconds(choice.seconds) << ',' << (i == trial.chosen ? 1 : 0) << '\n';
  }
  file_.flush();
}

}  // namespace horoplug
