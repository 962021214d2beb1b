// A submission that owns what it points to, without the memory of its tensors: what a binding keeps
// of an operation that it has prepared.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "horoplug/horoplug.h"

namespace horoplug::bindings {

class KeptSubmission {
 public:
  // The submission has no splits.
  explicit KeptSubmission(const hp_submission& given);
  KeptSubmission(const KeptSubmission&) = delete;
  KeptSubmission& operator=(const KeptSubmission&) = delete;

  const hp_submission& get() const { return own_; }
  // Whether another one differs by its tensors' memory and by the calling thread only.
  bool fits(const hp_submission& other) const {
    return has_name_of(other) && fits_apart_from_name(other);
  }
  bool fits_apart_from_name(const hp_submission& other) const;

  static std::span<const hp_tensor> tensors_of(const hp_submission& submission) {
    return {submission.tensors, static_cast<std::size_t>(submission.tensor_count)};
  }
  static std::span<const std::int64_t> shape_of(const hp_tensor& tensor) {
    return {tensor.shape, static_cast<std::size_t>(tensor.ndim)};
  }

 private:
  bool has_name_of(const hp_submission& other) const {
    if (own_.name == nullptr || other.name == nullptr) return own_.name == other.name;
    return name_ == other.name;
  }

  std::string name_, layout_;
  std::vector<std::vector<std::int64_t>> shapes_;
  std::vector<hp_tensor> tensors_;
  hp_submission own_;
};

}  // namespace horoplug::bindings
