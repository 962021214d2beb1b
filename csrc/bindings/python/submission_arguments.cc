#include "submission_arguments.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <tuple>

#include "program_threads.h"

namespace py = pybind11;

namespace horoplug::python {
namespace {

enum Parameter : std::size_t {
  kOp,
  kDtype,
  kTensors,
  kName,
  kReduceOp,
  kRoot,
  kPrescale,
  kPostscale,
  kSplits,
  kProcessSet,
  kWireDtype,
  kTag,
  kLayout,
  kDevice,
  kStream,
  kKeep,
  kParameterCount
};

constexpr std::array<const char*, kParameterCount> kParameterNames = {
    "op",     "dtype",       "tensors",    "name", "reduce_op", "root",   "prescale", "postscale",
    "splits", "process_set", "wire_dtype", "tag",  "layout",    "device", "stream",   "keep"};
constexpr std::size_t kRequired = kName;  // the parameters before this one have no default

// The value of each parameter, null for those that were not given. Borrowed references.
using Values = std::array<PyObject*, kParameterCount>;

std::size_t parameter_named(PyObject* name, std::size_t parameters) {
  for (std::size_t i = 0; i < parameters; ++i) {
    if (PyUnicode_CompareWithASCIIString(name, kParameterNames[i]) == 0) return i;
  }
  throw py::type_error("unexpected keyword argument '" + py::cast<std::string>(name) + "'");
}

Values bind(PyObject* const* given, Py_ssize_t count, PyObject* keywords, std::size_t parameters) {
  const auto positional = static_cast<std::size_t>(count);
  if (positional > parameters) {
    throw py::type_error("takes at most " + std::to_string(parameters) + " arguments (" +
                         std::to_string(positional) + " given)");
  }
  Values values = {};
  for (std::size_t i = 0; i < positional; ++i) values[i] = given[i];
  const Py_ssize_t named = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
  for (Py_ssize_t i = 0; i < named; ++i) {
    const std::size_t parameter = parameter_named(PyTuple_GET_ITEM(keywords, i), parameters);
    if (values[parameter] != nullptr) {
      throw py::type_error(std::string("argument '") + kParameterNames[parameter] +
                           "' is given twice");
    }
    values[parameter] = given[count + i];
  }
  for (std::size_t i = 0; i < kRequired; ++i) {
    if (values[i] == nullptr) {
      throw py::type_error(std::string("argument '") + kParameterNames[i] + "' is missing");
    }
  }
  return values;
}

std::int32_t to_int32(PyObject* number, std::int32_t absent) {
  if (number == nullptr) return absent;
  const std::int64_t value = to_int64(number);
  if (value < std::numeric_limits<std::int32_t>::min() ||
      value > std::numeric_limits<std::int32_t>::max()) {
    throw py::type_error("the number " + std::to_string(value) + " does not fit in 32 bits");
  }
  return static_cast<std::int32_t>(value);
}

double to_double(PyObject* number, double absent) {
  if (number == nullptr) return absent;
  const double value = PyFloat_AsDouble(number);
  if (value == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return value;
}

bool is_given(PyObject* object) { return object != nullptr && object != Py_None; }

// Null for None. Points into the object.
const char* to_text(PyObject* object, const char* objection) {
  if (!is_given(object)) return nullptr;
  if (!PyUnicode_Check(object)) throw py::type_error(objection);
  const char* const text = PyUnicode_AsUTF8(object);
  if (text == nullptr) throw py::error_already_set();
  return text;
}

}  // namespace

SubmissionArguments::SubmissionArguments(PyObject* const* values, Py_ssize_t count,
                                         PyObject* keywords, bool with_keep) {
  const Values of = bind(values, count, keywords, with_keep ? kParameterCount : kKeep);

  const Items items(of[kTensors], "tensors must be a sequence");
  auto* const tensors = arena_.allocate<hp_tensor>(items.size());
  for (Py_ssize_t i = 0; i < items.size(); ++i) {
    const Items fields(items[i], "a tensor must be (input, output, shape)");
    if (fields.size() != 3) throw py::value_error("a tensor must be (input, output, shape)");
    const auto [shape, ndim] = arena_.integers(fields[2], "a shape must be a sequence");
    tensors[i] = {to_pointer(fields[0]), to_pointer(fields[1]), shape, ndim, 0};
  }

  submission_.struct_size = sizeof(submission_);
  submission_.op = to_int32(of[kOp], 0);
  submission_.dtype = to_int32(of[kDtype], 0);
  submission_.reduce_op = to_int32(of[kReduceOp], 0);
  submission_.root = to_int32(of[kRoot], 0);
  submission_.device = to_int32(of[kDevice], -1);
  submission_.stream = of[kStream] == nullptr ? nullptr : to_pointer(of[kStream]);
  submission_.process_set = to_int32(of[kProcessSet], 0);
  submission_.wire_dtype = to_int32(of[kWireDtype], 0);
  submission_.tag = to_int32(of[kTag], 0);
  submission_.pool_thread = is_pool_thread() ? 1 : 0;
  submission_.prescale = to_double(of[kPrescale], 1.0);
  submission_.postscale = to_double(of[kPostscale], 1.0);
  submission_.tensors = tensors;
  submission_.tensor_count = static_cast<std::int32_t>(items.size());
  submission_.name = to_text(of[kName], "name must be a str or None");
  submission_.layout = to_text(of[kLayout], "layout must be a str or None");
  if (is_given(of[kSplits])) {
    std::tie(submission_.splits, submission_.split_count) =
        arena_.integers(of[kSplits], "splits must be a sequence");
  }
  if (of[kKeep] != nullptr) {
    const int keep = PyObject_IsTrue(of[kKeep]);
    if (keep < 0) throw py::error_already_set();
    keep_ = keep != 0;
  }
}

}  // namespace horoplug::python
