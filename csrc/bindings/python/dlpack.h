// Imports and exports arrays by DLPack: their memory, shape and strides. horoplug/numpy/dlpack.py
// interprets their dtypes.
#pragma once

#include <pybind11/pybind11.h>

namespace horoplug::python {

// Adds the class DlpackTensor with its functions to the module.
void add_dlpack(pybind11::module_& module);

}  // namespace horoplug::python
