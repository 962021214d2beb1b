// The settings of an engine: the rows of settings.def as C++ types.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/time.h"
#include "horoplug/horoplug.h"

namespace horoplug {

// A time limit that any thread may change while an engine uses it. kForever: it is never reached.
class TimeLimit {
 public:
  TimeLimit(Seconds limit) : limit_(limit) {}  // NOLINT(google-explicit-constructor)
  TimeLimit(const TimeLimit& other) : TimeLimit(other.get()) {}
  TimeLimit& operator=(const TimeLimit& other) { return *this = other.get(); }
  TimeLimit& operator=(Seconds limit) {
    limit_.store(limit, std::memory_order_relaxed);
    return *this;
  }
  Seconds get() const { return limit_.load(std::memory_order_relaxed); }
  bool operator==(const TimeLimit& other) const { return get() == other.get(); }

 private:
  std::atomic<Seconds> limit_;
};

// The time limits of the C ABI, where 0 means never, become those of the engine here and nowhere
// else.
inline Seconds time_limit(double seconds) { return seconds > 0 ? Seconds(seconds) : kForever; }

// For each kind of settings.def: its type here, and how a value of the C ABI becomes one.
namespace setting {

template <typename To>
struct Converted {
  using Type = To;
  template <typename From>
  static Type convert(From value) {
    return static_cast<Type>(value);
  }
};
using Bytes = Converted<std::int64_t>;
using Count = Converted<int>;
using Number = Converted<double>;
using Flag = Converted<bool>;
struct FlagOrUnset {
  using Type = std::optional<bool>;
  static Type convert(std::int64_t value) { return value == HP_UNSET ? Type() : Type(value != 0); }
};
struct Seconds {
  using Type = TimeLimit;
  static Type convert(double value) { return time_limit(value); }
};
using NeverOrSeconds = Seconds;
struct Text {
  using Type = std::string;  // empty: not set
  static Type convert(const char* value) { return value != nullptr ? value : ""; }
};

}  // namespace setting

struct Settings {
#define HP_SETTING(kind, name, variable, initial, ...) \
  setting::kind::Type name = setting::kind::convert(initial);
#include "horoplug/settings.def"
};

// What the caller's struct says. Throws Error for values that are not allowed.
Settings read_settings(const hp_settings& given);

// The settings that have to be the same on all ranks: what messages call them, and their values.
std::vector<std::pair<std::string, std::string>> compared_settings(const Settings& settings);

}  // namespace horoplug
