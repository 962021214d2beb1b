// An operation that a direct call has performed, for the next calls with its name; of those without
// a name, the last one.
#pragma once

#include <pybind11/pybind11.h>

#include "horoplug/horoplug.h"
#include "prepared.h"

namespace horoplug::python {

struct NamedOperation {
  explicit NamedOperation(const hp_submission& submission);
  ~NamedOperation() { Py_XDECREF(key); }
  NamedOperation(const NamedOperation&) = delete;
  NamedOperation& operator=(const NamedOperation&) = delete;

  Prepared operation;
  // What horoplug.common.context knows of it while it is in flight: (process set, name). nullptr:
  // it has no name.
  PyObject* key = nullptr;
};

// The operations of one function are in a dictionary of Python, by the names that its callers give:
// a lookup there does not hash a name again. Its values are capsules.
//
// The capsule of a name, or nullptr without an exception. A new reference, since another thread may
// take it out of the dictionary.
PyObject* find_named(PyObject* table, PyObject* name);
// Adds a new one, and forgets all others when they are very many. nullptr with an exception.
PyObject* add_named(PyObject* table, PyObject* name, const hp_submission& submission);
NamedOperation& named_operation(PyObject* capsule);

}  // namespace horoplug::python
