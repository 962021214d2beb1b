// What all of the driver's functions have in common: how they fail, and what they need.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string_view>

#include "tests/simulated/functions.h"

namespace horoplug::testing::simulated {

// How much a function asks of its caller.
enum class Needs { kNothing, kStart, kContext };

constexpr Needs needs(std::string_view name) {
  for (const std::string_view known : {"cuDriverGetVersion", "cuInit"}) {
    if (name == known) return Needs::kNothing;
  }
  const bool of_contexts = name.starts_with("cuCtx") || name.starts_with("cuDevice") ||
                           name == "cuPointerGetAttribute" || name == "cuEventQuery";
  return of_contexts ? Needs::kStart : Needs::kContext;
}

// Functions that may keep the host until the GPU is idle, and here do.
constexpr bool waits(std::string_view name) {
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
struct Name {
  char text[size];
  constexpr Name(const char (&from)[size]) { std::copy(from, from + size, text); }  // NOLINT
};

template <Name name, auto function>
struct Guarded;
template <Name name, typename... Args, CUresult (*function)(Args...)>
struct Guarded<name, function> {
  static CUresult call(Args... args) {
    constexpr Needs kNeeds = needs(name.text);
    const CUresult result = machine().before(name.text, kNeeds == Needs::kContext);
    if (result != cuda::kSuccess) return result;
    if (kNeeds != Needs::kNothing && !machine().is_started()) return kNotInitialized;
    if constexpr (waits(name.text)) {
      const int device = machine().current()->ordinal;
      const CUresult waited = machine().wait_for_device(name.text, device);
      if (waited != cuda::kSuccess) return waited;
    }
    return function(args...);
  }
};

}  // namespace horoplug::testing::simulated
