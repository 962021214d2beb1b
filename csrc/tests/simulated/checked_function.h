// What all of the driver's functions have in common: how they fail, and what they need.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string_view>

#include "tests/simulated/functions.h"

namespace horoplug::testing::simulated {

// How much a function asks of its caller.
enum class Requires { kNothing, kInit, kContext };

constexpr Requires required_by(std::string_view name) {
  for (const std::string_view known : {"cuDriverGetVersion", "cuInit"}) {
    if (name == known) return Requires::kNothing;
  }
  const bool of_contexts = name.starts_with("cuCtx") || name.starts_with("cuDevice") ||
                           name == "cuPointerGetAttribute" || name == "cuEventQuery";
  return of_contexts ? Requires::kInit : Requires::kContext;
}

// Functions that may keep the host until the GPU is idle, and here do.
constexpr bool waits_for_device(std::string_view name) {
  for (const std::string_view known :
       {"cuModuleLoadDataEx", "cuModuleGetFunction", "cuMemAlloc", "cuMemHostAlloc",
        "cuMemFreeHost", "cuMemHostRegister", "cuMemHostUnregister", "cuIpcOpenMemHandle",
        "cuIpcCloseMemHandle"}) {
    if (name == known) return true;
  }
  return false;
}

// Function names as template arguments.
template <std::size_t size>
struct FunctionName {
  char text[size];
  // NOLINTNEXTLINE(google-explicit-constructor): string literals convert to it.
  constexpr FunctionName(const char (&from)[size]) { std::copy(from, from + size, text); }
};

template <FunctionName name, auto function>
struct CheckedFunction;
template <FunctionName name, typename... Args, CUresult (*function)(Args...)>
struct CheckedFunction<name, function> {
  static CUresult call(Args... args) {
    constexpr Requires kRequired = required_by(name.text);
    const CUresult result = machine().check_call(name.text, kRequired == Requires::kContext);
    if (result != cuda::kSuccess) return result;
    if (kRequired != Requires::kNothing && !machine().is_started()) return kNotInitialized;
    if constexpr (waits_for_device(name.text)) {
      const int device = machine().current()->ordinal;
      const CUresult waited = machine().wait_for_device(name.text, device);
      if (waited != cuda::kSuccess) return waited;
    }
    return function(args...);
  }
};

}  // namespace horoplug::testing::simulated
