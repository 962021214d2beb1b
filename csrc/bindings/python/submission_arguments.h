// The arguments of Engine.submit and Engine.perform as an hp_submission.
//
// Both are called once for each operation of a program. pybind11 would look up each argument's
// converter and default through generic code, which costs more than all else that the module does
// in a call; they are therefore plain functions of CPython's vectorcall protocol.
#pragma once

#include <pybind11/pybind11.h>

#include "arguments.h"
#include "horoplug/horoplug.h"

namespace horoplug::python {

class SubmissionArguments {
 public:
  // `values`, `count` and `keywords` are those of METH_FASTCALL | METH_KEYWORDS. `with_keep`: the
  // method has the parameter `keep`. Raises TypeError for arguments that do not match the
  // parameters, which are those of the method in _native.pyi.
  SubmissionArguments(PyObject* const* values, Py_ssize_t count, PyObject* keywords,
                      bool with_keep);
  SubmissionArguments(const SubmissionArguments&) = delete;
  SubmissionArguments& operator=(const SubmissionArguments&) = delete;

  // Points into the arguments and into this object.
  const hp_submission& submission() const { return submission_; }
  bool keep() const { return keep_; }

 private:
  CallArena arena_;
  hp_submission submission_ = {};
  bool keep_ = true;
};

}  // namespace horoplug::python
