// Where a call on a card runs.
#pragma once

#include <cstdint>
#include <string>

#include "xla_ffi.h"

namespace horoplug::jax {

struct CardPlace {
  std::int32_t device = -1;  // its ordinal in CUDA; -1: the call is on the CPU
  void* stream = nullptr;    // in which XLA has put what comes before the call, and puts the rest
};

// Of a call on a card. Throws Failure, which says what fails: `subject`.
CardPlace card_place(const xla::CallFrame& frame, const std::string& subject);

}  // namespace horoplug::jax
