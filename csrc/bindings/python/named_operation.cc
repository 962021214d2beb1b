#include "named_operation.h"

#include <algorithm>
#include <memory>
#include <span>
#include <utility>

namespace horoplug::python {
namespace {

constexpr const char* kCapsule = "horoplug.named_operation";
// More names than a model has tensors. Programs that make a name for each step would fill the
// memory otherwise.
constexpr Py_ssize_t kMost = 1 << 14;

void destroy(PyObject* capsule) {
  delete static_cast<NamedOperation*>(PyCapsule_GetPointer(capsule, kCapsule));
}

std::span<const std::int64_t> shape_of(const hp_submission& submission) {
  const hp_tensor& tensor = *submission.tensors;
  return {tensor.shape, static_cast<std::size_t>(tensor.ndim)};
}

}  // namespace

NamedOperation::NamedOperation(std::string name, const hp_submission& submission)
    : name_(std::move(name)),
      shape_(shape_of(submission).begin(), shape_of(submission).end()),
      tensor_{nullptr, nullptr, shape_.data(), static_cast<std::int32_t>(shape_.size()), 0},
      submission_(submission),
      key_(name_.empty() ? nullptr : Py_BuildValue("(is)", submission.process_set, name_.c_str())) {
  submission_.tensors = &tensor_;
  if (name_.empty()) return;
  if (key_ == nullptr) throw pybind11::error_already_set();
  submission_.name = name_.c_str();
}

bool NamedOperation::fits(const hp_submission& submission) const {
  return submission.dtype == submission_.dtype && submission.reduce_op == submission_.reduce_op &&
         std::ranges::equal(shape_of(submission), shape_);
}

PyObject* find_named(PyObject* table, PyObject* name) {
  PyObject* const capsule = PyDict_GetItemWithError(table, name);
  if (capsule == nullptr && PyErr_Occurred() != nullptr) PyErr_Clear();
  return Py_XNewRef(capsule);
}

PyObject* add_named(PyObject* table, PyObject* name, std::string on_the_wire,
                    const hp_submission& submission) {
  auto made = std::make_unique<NamedOperation>(std::move(on_the_wire), submission);
  if (PyDict_GET_SIZE(table) >= kMost) PyDict_Clear(table);
  PyObject* const capsule = PyCapsule_New(made.get(), kCapsule, destroy);
  if (capsule == nullptr) return nullptr;
  static_cast<void>(made.release());
  if (PyDict_SetItem(table, name, capsule) == 0) return capsule;
  Py_DECREF(capsule);
  return nullptr;
}

NamedOperation& named_operation(PyObject* capsule) {
  return *static_cast<NamedOperation*>(PyCapsule_GetPointer(capsule, kCapsule));
}

}  // namespace horoplug::python
