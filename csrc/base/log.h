// The core writes log lines through one object that the engine owns. There is no global logger.
#pragma once

#include <functional>
#include <string>
#include <utility>

namespace horoplug {

enum class LogLevel : int { kTrace = 0, kDebug, kInfo, kWarning, kError, kFatal };

class Log {
 public:
  using Sink = std::function<void(LogLevel, const std::string&)>;

  Log() = default;
  Log(LogLevel smallest, Sink sink) : smallest_(smallest), sink_(std::move(sink)) {}

  bool enabled(LogLevel level) const { return sink_ && level >= smallest_; }
  void operator()(LogLevel level, const std::string& text) const {
    if (enabled(level)) sink_(level, text);
  }

 private:
  LogLevel smallest_ = LogLevel::kFatal;
  Sink sink_;
};

}  // namespace horoplug
