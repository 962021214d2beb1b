// Operations that are started again and again, prepared for the engine that runs.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <mutex>

#include "../common/kept_submission.h"
#include "horoplug/horoplug.h"

namespace horoplug::python {

class Engine;

// An operation in submitted memory: all of it but the tensors' addresses.
class Prepared {
 public:
  explicit Prepared(const hp_submission& submission) : submission_(submission) {}

  const bindings::KeptSubmission& submission() const { return submission_; }
  // HP_OK: `prepared` is for this engine. Another thread may replace it by one for a later engine,
  // so that the caller keeps it.
  hp_status on(const Engine& engine, std::shared_ptr<hp_prepared>& prepared);

 private:
  bindings::KeptSubmission submission_;
#ifdef Py_GIL_DISABLED
  std::mutex mutex_;
#endif
  std::uint64_t engine_ = 0;  // Engine::number() of the last one; 0: none
  std::shared_ptr<hp_prepared> prepared_;
};

}  // namespace horoplug::python
