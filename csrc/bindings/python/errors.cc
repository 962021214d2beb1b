#include "errors.h"

namespace py = pybind11;

namespace horoplug::python {
namespace {

PyObject* error_type = nullptr;

// The value of a future of PyTorch; raises the value if it is an exception. PyTorch's C++ code
// turns what a callback raises into a text, which has a line for each frame of Python in the
// traceback: here there is none.
py::object value_or_raise(const py::object& future) {
  py::object value = future.attr("value")();
  if (PyExceptionInstance_Check(value.ptr()) == 0) return value;
  PyObject* const type = PyExceptionInstance_Class(value.ptr());
  PyErr_Restore(py::reinterpret_borrow<py::object>(type).release().ptr(), value.release().ptr(),
                nullptr);
  throw py::error_already_set();
}

}  // namespace

py::object make_error(hp_status status, const std::string& message) {
  return py::handle(error_type)(static_cast<int>(status), message);
}

bool is_core_error(const py::error_already_set& error) { return error.matches(error_type); }

void raise(hp_status status, const std::string& message) {
  PyErr_SetObject(error_type, make_error(status, message).ptr());
  throw py::error_already_set();
}

void check(hp_status status) {
  if (status != HP_OK) raise(status, hp_last_error());
}

void add_errors(py::module_& module) {
  py::dict attributes;
  const py::cpp_function status(
      [](const py::object& self) { return self.attr("args")[py::int_(0)]; });
  attributes["status"] = py::module_::import("builtins").attr("property")(status);
  attributes["__doc__"] =
      "A failed call. args is (status, message); status is one of the values of Status.";
  error_type = PyErr_NewException("horoplug._native.Error", PyExc_Exception, attributes.ptr());
  if (error_type == nullptr) throw py::error_already_set();
  module.attr("Error") = py::handle(error_type);
  module.def("value_or_raise", &value_or_raise, py::arg("future"));
}

}  // namespace horoplug::python
