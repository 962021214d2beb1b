#include "kept_submission.h"

#include <algorithm>
#include <string_view>
#include <tuple>

namespace horoplug::bindings {
namespace {

std::string_view text_of(const char* text) { return text == nullptr ? "" : text; }

// Everything but the texts and shapes.
auto properties_of(const hp_submission& s) {
  return std::tuple(s.op, s.dtype, s.reduce_op, s.root, s.device, s.process_set, s.prescale,
                    s.postscale, s.wire_dtype, s.tag, s.tensor_count);
}

}  // namespace

KeptSubmission::KeptSubmission(const hp_submission& given)
    : name_(text_of(given.name)), layout_(text_of(given.layout)), own_(given) {
  for (const hp_tensor& tensor : tensors_of(given)) {
    const auto shape = shape_of(tensor);
    shapes_.emplace_back(shape.begin(), shape.end());
    tensors_.push_back({nullptr, nullptr, shapes_.back().data(), tensor.ndim, 0});
  }
  own_.tensors = tensors_.data();
  own_.name = given.name == nullptr ? nullptr : name_.c_str();
  own_.layout = layout_.c_str();
  own_.splits = nullptr;
  own_.stream = nullptr;
}

bool KeptSubmission::fits_apart_from_name(const hp_submission& other) const {
  const auto same_shape = [](const hp_tensor& a, const hp_tensor& b) {
    return std::ranges::equal(shape_of(a), shape_of(b));
  };
  return properties_of(own_) == properties_of(other) && layout_ == text_of(other.layout) &&
         std::ranges::equal(tensors_, tensors_of(other), same_shape);
}

}  // namespace horoplug::bindings
