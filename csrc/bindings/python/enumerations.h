// The enumerations of the C ABI and of direct calls as Python has them.
#pragma once

#include <pybind11/pybind11.h>

namespace horoplug::python {

// Adds Status, Op, ReduceOp, Tunable, MpiOnGpu, Takes, DirectOutput (enum.IntEnum) and dtypes(),
// dtype_size() to the module.
void add_enumerations(pybind11::module_& module);

}  // namespace horoplug::python
