// The operation that a direct call has started, until the program has waited for it.
#pragma once

#include <pybind11/pybind11.h>

#include "direct_call.h"
#include "horoplug/horoplug.h"

namespace horoplug::python {

// What an operation has of the function that has started it.
struct DirectStart {
  PyObject* calls;   // DirectCalls
  PyObject* engine;  // Engine
  PyObject* failed;
  PyObject* collect;
  PyObject* input;
  PyObject* output;
};

// What a function returns, if its operation has succeeded: the output, or what `collect` makes of a
// result for which the core has allocated memory. nullptr with an exception.
PyObject* result_of(const DirectStart& start, hp_handle handle);

// An object with the methods of horoplug.common.in_flight.Waitable, which is tracked: its tensors
// are kept until the program has waited for it. `key`: of the operation (see DirectCalls); nullptr:
// it has no name. These functions return nullptr with an exception.
PyObject* track_operation(const DirectCalls& shared, const DirectStart& start, hp_handle handle,
                          PyObject* key);
// Waits for it and returns the output. After an interrupt it is still in flight.
PyObject* wait_for(PyObject* operation);
// The handle of the user.
PyObject* number_of(PyObject* operation);

// Adds the type to the module.
void add_direct_operation(pybind11::module_& module);

}  // namespace horoplug::python
