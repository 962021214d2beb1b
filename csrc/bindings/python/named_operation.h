// An operation that a direct call has performed, for the next calls with its name; of those without
// a name, the last one.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "horoplug/horoplug.h"
#include "prepared.h"

namespace horoplug::python {

class NamedOperation {
 public:
  // `name`: on the wire; empty: none. `submission`: all but the name; its tensor is copied.
  NamedOperation(std::string name, const hp_submission& submission);
  ~NamedOperation() { Py_XDECREF(key_); }
  NamedOperation(const NamedOperation&) = delete;
  NamedOperation& operator=(const NamedOperation&) = delete;

  // Whether a call differs from it by its tensors' memory only.
  bool fits(const hp_submission& submission) const;
  // What horoplug.common.context knows of it while it is in flight: (process set, name). nullptr:
  // it has no name.
  PyObject* key() const { return key_; }
  hp_status on(const Engine& engine, std::shared_ptr<hp_prepared>& prepared) {
    return on_engine_.on(engine, submission_, prepared);
  }

 private:
  std::string name_;
  std::vector<std::int64_t> shape_;
  hp_tensor tensor_;
  hp_submission submission_;
  PyObject* key_;
  PreparedOnEngine on_engine_;
};

// The operations of one function are in a dictionary of Python, by the names that its callers give:
// a lookup there does not hash a name again. Its values are capsules.
//
// The capsule of a name, or nullptr without an exception. A new reference, since another thread may
// take it out of the dictionary.
PyObject* find_named(PyObject* table, PyObject* name);
// Adds a new one, and forgets all others when they are very many. nullptr with an exception.
PyObject* add_named(PyObject* table, PyObject* name, std::string on_the_wire,
                    const hp_submission& submission);
NamedOperation& named_operation(PyObject* capsule);

}  // namespace horoplug::python
