// The functions of NCCL, as the machine of the process does them.
#pragma once

#include <algorithm>
#include <cstddef>

#include "tests/simulated/nccl.h"

namespace horoplug::testing::simulated {

using cuda::NcclConfig;

// Under the names of the table.
struct NcclFunctions {
#define SIMULATED_FUNCTION(name, parameters) static ncclResult_t name parameters;
#define SIMULATED_TEXT(name, parameters) static const char* name parameters;
  HOROPLUG_NCCL_FUNCTIONS(SIMULATED_FUNCTION)
  HOROPLUG_NCCL_TEXTS(SIMULATED_TEXT)
#undef SIMULATED_FUNCTION
#undef SIMULATED_TEXT
};

// Function names as template arguments.
template <std::size_t size>
struct NcclFunctionName {
  char text[size];
  // NOLINTNEXTLINE(google-explicit-constructor): string literals convert to it.
  constexpr NcclFunctionName(const char (&from)[size]) { std::copy(from, from + size, text); }
};

// A function that fails when it has been told to.
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
