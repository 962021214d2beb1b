// From the status of a C ABI call to the Python exception horoplug._native.Error.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "horoplug/horoplug.h"

namespace horoplug::python {

// A new Error object; does not set the Python error indicator.
pybind11::object make_error(hp_status status, const std::string& message);

// Whether it is an Error.
bool is_core_error(const pybind11::error_already_set& error);

[[noreturn]] void raise(hp_status status, const std::string& message);

// Raises Error with the text of hp_last_error() unless `status` is HP_OK.
void check(hp_status status);

// Adds the class Error, and value_or_raise, to the module.
void add_errors(pybind11::module_& module);

}  // namespace horoplug::python
