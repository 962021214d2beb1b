// Operations that are started again and again, prepared for the engine that runs.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "horoplug/horoplug.h"

namespace horoplug::python {

class Engine;

// The result of hp_prepare for one operation, on the engine that runs.
class PreparedOnEngine {
 public:
  // HP_OK: `prepared` is for this engine. Another thread may replace it by one for a later engine,
  // so that the caller keeps it.
  hp_status on(const Engine& engine, const hp_submission& submission,
               std::shared_ptr<hp_prepared>& prepared);

 private:
#ifdef Py_GIL_DISABLED
  std::mutex mutex_;
#endif
  std::uint64_t engine_ = 0;  // Engine::number(); 0: none
  std::shared_ptr<hp_prepared> prepared_;
};

// An in-place operation on one tensor: all of it but the tensor's address.
class Prepared {
 public:
  Prepared(int op, int dtype, std::vector<std::int64_t> shape, std::string name, int reduce_op,
           double prescale, double postscale, int process_set, int wire_dtype, int device)
      : name_(std::move(name)), shape_(std::move(shape)) {
    submission_.struct_size = sizeof(submission_);
    submission_.op = op;
    submission_.dtype = dtype;
    submission_.reduce_op = reduce_op;
    submission_.prescale = prescale;
    submission_.postscale = postscale;
    submission_.process_set = process_set;
    submission_.device = device;
    submission_.wire_dtype = wire_dtype;
    submission_.name = name_.c_str();
    submission_.tensors = &tensor_;
    submission_.tensor_count = 1;
    tensor_ = {nullptr, nullptr, shape_.data(), static_cast<std::int32_t>(shape_.size()), 0};
  }
  Prepared(const Prepared&) = delete;
  Prepared& operator=(const Prepared&) = delete;

  hp_status on(const Engine& engine, std::shared_ptr<hp_prepared>& prepared) {
    return on_engine_.on(engine, submission_, prepared);
  }

 private:
  std::string name_;
  std::vector<std::int64_t> shape_;
  hp_tensor tensor_ = {};
  hp_submission submission_ = {};
  PreparedOnEngine on_engine_;
};

}  // namespace horoplug::python
