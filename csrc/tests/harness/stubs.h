// Where the libraries of stubs/ lie.
#pragma once

#include <string>

namespace horoplug::testing {

// A file of a kind: stub("old", "libcuda.so.1").
std::string stub(const std::string& kind, const std::string& file);

}  // namespace horoplug::testing
