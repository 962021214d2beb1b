#pragma once

#include "horoplug/horoplug.h"

namespace horoplug::bindings {

// Releases a handle, and the results that belong to it, at the end of a scope.
class ScopedHandle {
 public:
  ScopedHandle(hp_engine* engine, hp_handle handle) : engine_(engine), handle_(handle) {}
  ~ScopedHandle() { hp_release(engine_, handle_); }
  ScopedHandle(const ScopedHandle&) = delete;
  ScopedHandle& operator=(const ScopedHandle&) = delete;

 private:
  hp_engine* const engine_;
  const hp_handle handle_;
};

}  // namespace horoplug::bindings
