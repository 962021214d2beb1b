#include "errors.h"

namespace py = pybind11;

namespace horoplug::python {
namespace {

PyObject* error_type = nullptr;

}  // namespace

py::object make_error(hp_status status, const std::string& message) {
  return py::handle(error_type)(static_cast<int>(status), message);
}

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
}

}  // namespace horoplug::python
