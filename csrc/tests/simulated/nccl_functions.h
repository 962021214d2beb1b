// The simulated implementations of NCCL's functions.
#pragma once

#include <algorithm>
#include <cstddef>

#include "tests/simulated/nccl.h"

namespace horoplug::testing::simulated {

using cuda::NcclConfig;

// Each function has the name of its entry in cuda::NcclApi.
struct NcclFunctions {
#define SIMULATED_FUNCTION(name, parameters) static ncclResult_t name parameters;
#define SIMULATED_TEXT(name, parameters) static const char* name parameters;
  HOROPLUG_NCCL_FUNCTIONS(SIMULATED_FUNCTION)
  HOROPLUG_NCCL_TEXTS(SIMULATED_TEXT)
#undef SIMULATED_FUNCTION
#undef SIMULATED_TEXT
};

// A function name as a template argument.
template <std::size_t size>
struct NcclFunctionName {
  char text[size];
  // NOLINTNEXTLINE(google-explicit-constructor): string literals convert to it.
  constexpr NcclFunctionName(const char (&from)[size]) { std::copy(from, from + size, text); }
};

// Wraps an NCCL function: it returns the error that SimulatedNccl::fail() has set for it, if any.
template <NcclFunctionName name, auto function>
struct NcclCheckedFunction;
template <NcclFunctionName name, typename... Args, ncclResult_t (*function)(Args...)>
struct NcclCheckedFunction<name, function> {
  static ncclResult_t call(Args... args) {
    const ncclResult_t result = NcclMachine::get().check_call(name.text);
    return result != cuda::kNcclSuccess ? result : function(args...);
  }
};

}  // namespace horoplug::testing::simulated
