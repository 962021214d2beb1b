// One object of a type for each process.
#pragma once

#include <pthread.h>

namespace horoplug::bindings {

// The object of this process. It is never destroyed, because threads use it until the process ends.
// A forked child gets a new one: the parent's threads do not exist in the child, and the parent's
// locks may be held forever.
template <typename T>
T& per_process() {
  static T* current = nullptr;
  [[maybe_unused]] static const bool registered = [] {
    current = new T;
    ::pthread_atfork(nullptr, nullptr, [] { current = new T; });
    return true;
  }();
  return *current;
}

}  // namespace horoplug::bindings
