// How processes say what the simulated libraries are to be like: environment variables.
#pragma once

#include <cstdlib>
#include <string>

namespace horoplug::testing::simulated {

inline std::string setting(const std::string& name, const std::string& otherwise) {
  const char* const value = std::getenv(name.c_str());
  return value != nullptr ? value : otherwise;
}
inline long long setting(const std::string& name, long long otherwise) {
  const std::string value = setting(name, std::string());
  return value.empty() ? otherwise : std::atoll(value.c_str());
}

}  // namespace horoplug::testing::simulated
