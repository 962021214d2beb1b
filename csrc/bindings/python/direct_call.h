// Public functions that go to the core in one call from Python.
#pragma once

#include <pybind11/pybind11.h>

namespace horoplug::python {

class Engine;

// What all such functions of a process share: the running engine, and the names of operations for
// which the program has not waited (Context.submitted).
class DirectCalls {
 public:
  explicit DirectCalls(pybind11::set fresh) : fresh_(std::move(fresh)) {}

  // The engine that runs now, or None.
  void use(pybind11::object engine);

  Engine* engine() const { return engine_; }
  const pybind11::object& engine_object() const { return engine_object_; }
  // Whether the program has waited for all operations that have a name.
  bool has_waited() const { return PySet_GET_SIZE(fresh_.ptr()) == 0; }
  void waited() const {
    if (!has_waited()) PySet_Clear(fresh_.ptr());
  }

 private:
  pybind11::set fresh_;
  pybind11::object engine_object_ = pybind11::none();
  Engine* engine_ = nullptr;
};

// Adds DirectCalls and DirectFunction to the module.
void add_direct_calls(pybind11::module_& module);

}  // namespace horoplug::python
