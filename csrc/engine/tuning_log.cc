#include "engine/tuning_log.h"

#include <unistd.h>

#include <cerrno>
#include <sstream>
#include <system_error>

#include "base/private_file.h"

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
  fd_ = open_private_file(path,
                          "the log of the autotuner (HOROVOD_AUTOTUNE_LOG) cannot be written to");
  if (::ftruncate(fd_, 0) == 0) append("process_set,setting,value,steps,median_step_ms,chosen\n");
  writer_ = std::make_unique<Worker>();
}

TuningLog::~TuningLog() {
  constexpr Seconds kAsLongAsItTakes{1e9};
  if (writer_) writer_->run([] {}, kAsLongAsItTakes);
  if (fd_ >= 0) ::close(fd_);
}

void TuningLog::append(std::string_view text) {
  while (fd_ >= 0 && !text.empty()) {
    const ssize_t written = ::write(fd_, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      log_(LogLevel::kWarning,
           "the log of the autotuner ends here: " + std::generic_category().message(errno));
      ::close(fd_);
      fd_ = -1;
      return;
    }
    text.remove_prefix(static_cast<std::size_t>(written));
  }
}

void TuningLog::write(std::uint32_t set, const Trial& trial) {
  log_(LogLevel::kInfo, "autotune, process set " + std::to_string(set) + ": " + summary(trial));
  std::ostringstream lines;
  for (std::size_t i = 0; i < trial.choices.size(); ++i) {
    const Trial::Choice& choice = trial.choices[i];
    lines << set << ',' << trial.setting << ',' << choice.value << ',' << trial.turns << ','
          << milliseconds(choice.seconds) << ',' << (i == trial.chosen ? 1 : 0) << '\n';
  }
  if (writer_) writer_->post([this, text = lines.str()] { append(text); });
}

}  // namespace horoplug
