// A simulated event: which of its records have come to pass.
#pragma once

#include <cstddef>
#include <string>

#include "tests/simulated/counter.h"

namespace horoplug::testing::simulated {

// Lies in memory of zeros, which other processes may have, too.
struct EventState {
  static constexpr std::uint32_t kSlots = 64;  // records that can be under way

  Counter recorded;        // how many there were
  Counter passed[kSlots];  // the last record of each slot that has come to pass

  Counter& slot(std::uint32_t record) { return passed[record % kSlots]; }
};

// What a CUevent points to. It stays in place for good.
struct Event {
  int device;
  unsigned flags;
  unsigned number;
  EventState* state;
  std::string name;  // of the block that it lies in
  bool imported = false;
};

}  // namespace horoplug::testing::simulated
