// A simulated event: counts its records and those that its streams have reached.
#pragma once

#include <cstddef>
#include <string>

#include "tests/simulated/counter.h"

namespace horoplug::testing::simulated {

// Zero at first; interprocess events have it in memory that processes share.
struct EventState {
  static constexpr std::uint32_t kSlots = 64;  // the maximum number of pending records

  Counter recorded;        // the number of cuEventRecord calls
  Counter passed[kSlots];  // per slot: the last record that its stream has reached

  Counter& slot(std::uint32_t record) { return passed[record % kSlots]; }
};

// What a CUevent points to. Its address stays valid after cuEventDestroy.
struct Event {
  int device;
  unsigned flags;
  unsigned number;
  EventState* state;
  std::string name;       // of its NamedMemory region; empty: not an interprocess event
  bool imported = false;  // opened by cuIpcOpenEventHandle
};

}  // namespace horoplug::testing::simulated
