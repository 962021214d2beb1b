// Reads the settings of the simulated libraries from environment variables.
#pragma once

#include <cstdlib>
#include <string>

namespace horoplug::testing::simulated {

inline std::string setting(const std::string& name, const std::string& default_value) {
  const char* const value = std::getenv(name.c_str());
  return value != nullptr ? value : default_value;
}
inline long long setting(const std::string& name, long long default_value) {
  const std::string value = setting(name, std::string());
  return value.empty() ? default_value : std::strtoll(value.c_str(), nullptr, 10);
}

}  // namespace horoplug::testing::simulated
