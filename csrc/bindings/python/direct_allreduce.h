// The method `allreduce` of the process groups of torch.distributed, in C.
#pragma once

#include <pybind11/pybind11.h>

namespace horoplug::python {

// Adds DirectAllreduce and DirectGroup to the module.
void add_direct_allreduce(pybind11::module_& module);

}  // namespace horoplug::python
