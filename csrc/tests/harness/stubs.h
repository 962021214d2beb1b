// Finds the libraries that stubs/ builds.
#pragma once

#include <string>

namespace horoplug::testing {

// The path of a library of a kind: stub("old", "libcuda.so.1").
std::string stub(const std::string& kind, const std::string& file);

}  // namespace horoplug::testing
