// The driver's functions, as the machine of the process does them.
#pragma once

#include <cstdio>
#include <string>

#include "tests/simulated/machine.h"

namespace horoplug::testing::simulated {

// Under the names of the table. What is common to all has been done before: see driver.cc.
struct Functions {
#define SIMULATED_FUNCTION(name, symbol, parameters) static CUresult name parameters;
  HOROPLUG_CUDA_FUNCTIONS(SIMULATED_FUNCTION)
#undef SIMULATED_FUNCTION
};

inline Machine& machine() { return Machine::get(); }

inline CUresult unknown_handle(const char* what) {
  return machine().misuse(std::string(what) + " that is not known, or has been given back",
                          kInvalidHandle);
}

// What a stream still uses is given back by this call.
inline CUresult in_use(const Allocation& memory, const char* call) {
  char text[200];
  std::snprintf(text, sizeof text, "%s of %zu bytes at %p, which a stream still uses", call,
                memory.bytes, static_cast<void*>(memory.data));
  return machine().misuse(text);
}

}  // namespace horoplug::testing::simulated
