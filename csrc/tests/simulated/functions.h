// The simulated implementations of the CUDA driver's functions.
#pragma once

#include <cstdio>
#include <string>

#include "tests/simulated/machine.h"

namespace horoplug::testing::simulated {

// Each function has the name of its entry in cuda::DriverApi. Callers reach them through
// CheckedFunction, which makes the checks that all of them share.
struct Functions {
#define SIMULATED_FUNCTION(name, symbol, parameters) static CUresult name parameters;
  HOROPLUG_CUDA_FUNCTIONS(SIMULATED_FUNCTION)
#undef SIMULATED_FUNCTION
};

inline Machine& machine() { return Machine::get(); }

inline CUresult unknown_handle(const char* what) {
  return machine().misuse(std::string(what) + " that is not known, or was destroyed or freed",
                          kInvalidHandle);
}

// Reports that `call` frees memory that work in a stream still uses.
inline CUresult in_use(const Allocation& memory, const char* call) {
  char text[200];
  std::snprintf(text, sizeof text, "%s of %zu bytes at %p, which a stream still uses", call,
                memory.bytes, static_cast<void*>(memory.data));
  return machine().misuse(text);
}

}  // namespace horoplug::testing::simulated
