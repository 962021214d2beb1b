// Tensors as C reads them, without Python: NumPy's arrays by their structure or by the buffer
// protocol, PyTorch's tensors by the functions of DLPack 1.2.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "dlpack_layout.h"

namespace horoplug::python {

// The tensors of a framework.
struct TensorKind {
  PyTypeObject* type;     // not of its subclasses
  const DlExchange* api;  // nullptr: they have the buffer protocol
  bool by_structure;      // they are arrays of NumPy with the structure that is known here
};

// The functions in a capsule of DLPack; nullptr with an exception: tensors cannot be described so.
const DlExchange* exchange_of(PyObject* capsule);

// Whether the arrays of this class, numpy.ndarray, have the structure of numpy_layout.h. Leaves no
// exception.
bool has_known_structure(PyTypeObject* type);

// A tensor as hp_submission describes it.
struct TensorView {
  void* data = nullptr;
  const std::int64_t* shape = nullptr;
  std::int32_t ndim = 0;
  std::int32_t dtype = -1;
  Py_buffer buffer = {};
};

// Describes a tensor in host memory that has elements, which are integers or floating-point numbers
// and lie there as they are, in row-major order. `writable`: it may be overwritten. Returns false
// for anything else; leaves no exception. close() follows in either case.
bool open(const TensorKind& kind, PyObject* tensor, bool writable, TensorView& view);

// Not a destructor: the end of the interpreter ends a daemon thread by unwinding, without the GIL.
void close(TensorView& view);

// Whether an attribute of a tensor, or the result of a method without arguments, is False.
bool is_false(PyObject* answer);

}  // namespace horoplug::python
