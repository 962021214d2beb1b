// The end of an operation that a framework's kernel has begun.
#pragma once

#include "horoplug/horoplug.h"

namespace horoplug::bindings {

// Lets go of a handle, and of the results that come with it, at the end of a scope.
class Release {
 public:
  Release(hp_engine* engine, hp_handle handle) : engine_(engine), handle_(handle) {}
  ~Release() { hp_release(engine_, handle_); }
  Release(const Release&) = delete;
  Release& operator=(const Release&) = delete;

 private:
  hp_engine* const engine_;
  const hp_handle handle_;
};

}  // namespace horoplug::bindings
