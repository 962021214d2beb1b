// Public functions that go to the core in one call from Python.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>

namespace horoplug::python {

class Engine;

// What all such functions of a process share with horoplug.common.context: the running engine, the
// operations in flight, and the names of those for which the program has not waited.
class DirectCalls {
 public:
  DirectCalls(pybind11::set fresh, pybind11::dict operations, pybind11::object numbers)
      : fresh_(std::move(fresh)),
        operations_(std::move(operations)),
        numbers_(std::move(numbers)) {}

  // The engine that runs now, or None.
  void use(pybind11::object engine);

  Engine* engine() const { return engine_; }
  const pybind11::object& engine_object() const { return engine_object_; }
  // See Context.check_name, submitted and waited. `key`: (process set, name).
  bool has_fresh() const { return PySet_GET_SIZE(fresh_.ptr()) > 0; }
  bool is_fresh(PyObject* key) const { return PySet_Contains(fresh_.ptr(), key) != 0; }
  void submitted(PyObject* key) const { PySet_Add(fresh_.ptr(), key); }
  void waited() const {
    if (has_fresh()) PySet_Clear(fresh_.ptr());
  }
  // See Context.track: the handle of the user; nullptr with an exception.
  PyObject* track(PyObject* operation) const;
  // Whether the operation was tracked.
  bool forget(PyObject* number) const;

 private:
  pybind11::set fresh_;
  pybind11::dict operations_;
  pybind11::object numbers_;
  pybind11::object engine_object_ = pybind11::none();
  Engine* engine_ = nullptr;
};

// A call of a DirectFunction, as Python's protocol `vectorcall` has it.
PyObject* call_directly(PyObject* function, PyObject* const* values, std::size_t count,
                        PyObject* keywords);

// Adds DirectCalls, DirectFunction and DirectOperation to the module.
void add_direct_calls(pybind11::module_& module);

}  // namespace horoplug::python
