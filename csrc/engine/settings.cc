#include "engine/settings.h"

#include <sstream>
#include <utility>

#include "base/status.h"

namespace horoplug {
namespace {

template <typename Value, typename Low, typename High>
void check_range(const char* name, Value value, Low low, High high, const char* unit) {
  if (value >= static_cast<Value>(low) && value <= static_cast<Value>(high)) return;
  std::ostringstream text;
  text << name << " is " << value << "; it must be from " << low << " to " << high
       << (*unit != '\0' ? " " : "") << unit;
  throw Error(HP_INVALID_ARGUMENT, text.str());
}
void check_range(const char*, const char*, int, int, const char*) {}

std::string describe(const std::string& text) { return text.empty() ? "not set" : text; }
std::string describe(const std::optional<bool>& flag) {
  return flag ? std::to_string(int{*flag}) : describe(std::string());
}
std::string describe(const TimeLimit& limit) { return describe_seconds(limit.get()); }
template <typename Value>
std::string describe(Value value) {
  return std::to_string(value);
}

}  // namespace

Settings read_settings(const hp_settings& given) {
  Settings settings;
#define HP_SETTING(kind, name, variable, initial, low, high, unit, ...) \
  check_range(#name, given.name, low, high, unit);                      \
  settings.name = setting::kind::convert(given.name);
#include "horoplug/settings.def"
  return settings;
}

std::vector<std::pair<std::string, std::string>> compared_settings(const Settings& settings) {
  std::vector<std::pair<std::string, std::string>> list;
  const auto add = [&list](std::string name, const std::string& variable, std::string value) {
    if (name.empty()) return;
    if (!variable.empty()) name += " (HOROPLUG_" + variable + ")";
    list.emplace_back(std::move(name), std::move(value));
  };
#define HP_SETTING(kind, name, variable, initial, low, high, unit, compared, doc) \
  add(compared, variable, describe(settings.name));
#include "horoplug/settings.def"
  return list;
}

}  // namespace horoplug
