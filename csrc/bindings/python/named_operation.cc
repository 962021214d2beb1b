#include "named_operation.h"

#include <memory>

namespace horoplug::python {
namespace {

constexpr const char* kCapsule = "horoplug.named_operation";
// More names than a model has tensors. Programs that make a name for each step would fill the
// memory otherwise.
constexpr Py_ssize_t kMost = 1 << 14;

void destroy(PyObject* capsule) {
  delete static_cast<NamedOperation*>(PyCapsule_GetPointer(capsule, kCapsule));
}

}  // namespace

NamedOperation::NamedOperation(const hp_submission& submission) : operation(submission) {
  if (submission.name == nullptr) return;
  key = Py_BuildValue("(is)", submission.process_set, submission.name);
  if (key == nullptr) throw pybind11::error_already_set();
}

PyObject* find_named(PyObject* table, PyObject* name) {
  PyObject* const capsule = PyDict_GetItemWithError(table, name);
  if (capsule == nullptr && PyErr_Occurred() != nullptr) PyErr_Clear();
  return Py_XNewRef(capsule);
}

PyObject* add_named(PyObject* table, PyObject* name, const hp_submission& submission) {
  auto made = std::make_unique<NamedOperation>(submission);
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
