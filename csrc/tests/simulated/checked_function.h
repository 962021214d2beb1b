// Wraps each driver function with the checks that all of them share: injected failures, a lost
// device, and the required cuInit or context.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string_view>

#include "tests/simulated/functions.h"

namespace horoplug::testing::simulated {

// What a function requires of its caller.
enum class Requires { kNothing, kInit, kContext };

constexpr Requires required_by(std::string_view name) {
  for (const std::string_view known : {"cuDriverGetVersion", "cuInit"}) {
    if (name == known) return Requires::kNothing;
  }
  const bool without_context = name.starts_with("cuCtx") || name.starts_with("cuDevice") ||
                               name == "cuPointerGetAttribute" || name == "cuEventQuery";
  return without_context ? Requires::kInit : Requires::kContext;
}

// Functions that CUDA allows to block the host until the GPU is idle. Here they always block.
constexpr bool waits_for_device(std::string_view name) {
  for (const std::string_view known :
       {"cuModuleLoadDataEx", "cuModuleGetFunction", "cuMemAlloc", "cuMemHostAlloc",
        "cuMemFreeHost", "cuMemHostRegister", "cuMemHostUnregister", "cuIpcOpenMemHandle",
        "cuIpcCloseMemHandle"}) {
    if (name == known) return true;
  }
  return false;
}

// A function name as a template argument.
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
