// The structures of NumPy's C API (numpy/ndarraytypes.h) that the bindings read. They are the same
// in NumPy 1 and 2; the bindings are compiled without NumPy and compare them with the buffer
// protocol once before they use them.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace horoplug::python {

struct NumpyType {
  PyObject head;
  PyTypeObject* scalar;
  char kind;
  char type;       // a letter of the module struct, for integers and floating-point numbers
  char byteorder;  // '=': native; '|': of one byte
};

struct NumpyArray {
  PyObject head;
  void* data;
  int ndim;
  std::int64_t* shape;
  std::int64_t* strides;
  PyObject* base;
  NumpyType* dtype;
  int flags;

  static constexpr int kRowMajor = 0x1, kAligned = 0x100, kWritable = 0x400;
  bool has(int all) const { return (flags & all) == all; }
};

}  // namespace horoplug::python
