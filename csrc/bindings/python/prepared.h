// An in-place operation on one tensor that is submitted again and again: all of it but the tensor's
// address is set once.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "horoplug/horoplug.h"

namespace horoplug::python {

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
    submission_.tensor_count = 1;
  }
  Prepared(const Prepared&) = delete;
  Prepared& operator=(const Prepared&) = delete;

  // The operation on the tensor at `address`, which is ready in `stream`. Fills `tensor` with its
  // description.
  hp_submission on(void* address, void* stream, hp_tensor* tensor) const {
    *tensor = {address, address, shape_.data(), static_cast<std::int32_t>(shape_.size()), 0};
    hp_submission submission = submission_;
    submission.tensors = tensor;
    submission.stream = stream;
    return submission;
  }

 private:
  std::string name_;
  std::vector<std::int64_t> shape_;
  hp_submission submission_ = {};
};

}  // namespace horoplug::python
