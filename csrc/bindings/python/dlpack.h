// Arrays by DLPack, in both directions. Only where they lie and what they look like: what they are
// made of is the affair of horoplug/numpy/dlpack.py.
#pragma once

#include <pybind11/pybind11.h>

namespace horoplug::python {

// Adds the class DlpackTensor with its functions to the module.
void add_dlpack(pybind11::module_& module);

}  // namespace horoplug::python
