// Calls of a DirectFunction.
//
// It performs the usual call itself: it reads the tensor, has the core perform or start the
// operation, and returns the result or a handle, without a frame of Python. Any other call it
// passes on to the function written in Python, with the same arguments; so it is that function that
// says what is wrong with a call. A call is usual if
//
//   - the engine runs, and no operation of this name is in flight for all the program knows;
//   - a function that takes no tensor has no arguments at all;
//   - the arguments by position are the tensor, the other rank if the operation has one (a root, a
//     destination or a source), and the tag if it has one; the others are `name` (a string of at
//     most kLongestName bytes), `op` (an int; not Adasum), and those two by their names (ints that
//     are not negative), or none;
//   - a function on a group gets a list or a tuple of at least one tensor, all of one dtype;
//   - each tensor is of the class itself, not of a subclass, and in host memory; it has elements,
//     which lie there as they are, in row-major order, and are integers or floating-point numbers;
//     it is writable if it is overwritten, and not a scalar if its rows are distributed;
//   - nothing differentiates the operation: it overwrites the tensor, or that needs no gradient.
#include "direct_call.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <span>
#include <string>
#include <vector>

#include "direct_function.h"
#include "direct_operation.h"
#include "direct_tensor.h"
#include "engine.h"
#include "errors.h"
#include "horoplug/horoplug.h"
#include "named_operation.h"
#include "program_threads.h"

namespace py = pybind11;

namespace horoplug::python {

void DirectCalls::use(py::object engine) {
  engine_ = engine.is_none() ? nullptr : &engine.cast<Engine&>();
  engine_object_ = std::move(engine);
}

PyObject* DirectCalls::track(PyObject* operation) const {
  PyObject* const number = PyIter_Next(numbers_.ptr());
  if (number == nullptr || PyDict_SetItem(operations_.ptr(), number, operation) == 0) return number;
  Py_DECREF(number);
  return nullptr;
}

bool DirectCalls::forget(PyObject* number) const {
  if (PyDict_DelItem(operations_.ptr(), number) == 0) return true;
  PyErr_Clear();
  return false;
}

namespace {

constexpr std::size_t kLongestName = 200;

// Interned, as the names of keyword arguments in a program are.
struct Names {
  PyObject* name = PyUnicode_InternFromString("name");
  PyObject* op = PyUnicode_InternFromString("op");
  PyObject* tag = PyUnicode_InternFromString("tag");
  PyObject* requires_grad = PyUnicode_InternFromString("requires_grad");
};
const Names* names = nullptr;

// The options of a usual call.
struct Options {
  std::int32_t reduction = HP_AVERAGE;
  std::int32_t root = -1;    // -1: none is given
  std::int32_t tag = -1;     // the same
  PyObject* name = nullptr;  // borrowed
};

// The name on the wire; empty: only the function written in Python knows what to do with the name.
std::string on_the_wire(const DirectFunction& self, PyObject* name) {
  Py_ssize_t size = 0;
  const char* const text = PyUnicode_AsUTF8AndSize(name, &size);
  if (text == nullptr) PyErr_Clear();
  if (text == nullptr || size == 0 || static_cast<std::size_t>(size) > kLongestName ||
      std::memchr(text, 0, size) != nullptr) {
    return {};
  }
  return std::string(PyUnicode_AsUTF8(self.prefix)) + text;
}

bool take_reduction(const DirectFunction& self, PyObject* given, Options& options) {
  if (!PyLong_CheckExact(given)) return false;
  int overflow = 0;
  const long value = PyLong_AsLongAndOverflow(given, &overflow);
  if (value < 0 || value >= HP_REDUCE_OP_COUNT || (self.reductions >> value & 1) == 0) return false;
  options.reduction = static_cast<std::int32_t>(value);
  return true;
}

// A root or a tag, which is given once.
bool take_number(PyObject* given, std::int32_t& number) {
  if (!PyLong_CheckExact(given) || number >= 0) return false;
  int overflow = 0;
  const long value = PyLong_AsLongAndOverflow(given, &overflow);
  if (value < 0 || value > std::numeric_limits<std::int32_t>::max()) return false;
  number = static_cast<std::int32_t>(value);
  return true;
}

// `given`: the number of arguments by position.
bool take_options(const DirectFunction& self, PyObject* const* values, Py_ssize_t given,
                  PyObject* keywords, Options& options) {
  const Py_ssize_t count = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
  if (self.takes == Takes::kNothing) return given == 0 && count == 0;
  if (given < 1 || given > self.most_given()) return false;
  if (given > 1 && !take_number(values[1], options.root)) return false;
  if (given > 2 && !take_number(values[2], options.tag)) return false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* const keyword = PyTuple_GET_ITEM(keywords, i);
    PyObject* const value = values[given + i];
    if (keyword == names->name) {
      if (!PyUnicode_CheckExact(value)) return false;
      options.name = value;
    } else if (keyword == self.root) {
      if (!take_number(value, options.root)) return false;
    } else if (keyword == names->tag && self.has_tag != 0) {
      if (!take_number(value, options.tag)) return false;
    } else if (keyword != names->op || !take_reduction(self, value, options)) {
      return false;
    }
  }
  return !self.has_root() || options.root >= 0;
}

// One tensor of a call.
struct Tensor {
  PyObject* given = nullptr;   // borrowed
  PyObject* output = nullptr;  // a reference
  TensorView input, made;
};

struct UsualCall {
  explicit UsualCall(const DirectFunction& of)
      : self(of),
        engine(*of.shared->engine()),
        engine_object(Py_NewRef(of.shared->engine_object().ptr())) {}
  UsualCall(const UsualCall&) = delete;
  UsualCall& operator=(const UsualCall&) = delete;

  const DirectFunction& self;
  Engine& engine;
  PyObject* engine_object;    // another thread may end the job meanwhile
  PyObject* input = nullptr;  // the tensor, or a tuple of those of a group: another thread may
                              // change the list meanwhile
  PyObject* output = nullptr;
  Options options;
  hp_submission submission = {};
  PyObject* named = nullptr;  // the capsule of the operation of this name

  // A group's are allocated.
  Tensor one_tensor;
  hp_tensor one_described = {};
  std::vector<Tensor> more_tensors;
  std::vector<hp_tensor> more_described;
  std::span<Tensor> tensors{&one_tensor, 1};
  std::span<hp_tensor> described{&one_described, 1};

  PyObject* key() const { return named == nullptr ? nullptr : named_operation(named).key; }
};

// Finds the operation that was performed under this name before, or the last one without a name, or
// makes it.
bool find_operation(UsualCall& call) {
  const DirectFunction& self = call.self;
  const bool has_name = call.options.name != nullptr;
  PyObject* const name = has_name ? call.options.name : Py_None;
  call.named = find_named(self.named, name);
  const auto fits = [&](const Prepared& known) {
    return known.submission().fits_apart_from_name(call.submission);
  };
  if (call.named == nullptr || !fits(named_operation(call.named).operation)) {
    Py_CLEAR(call.named);
    const std::string text = has_name ? on_the_wire(self, name) : "";
    if (has_name && text.empty()) return false;
    hp_submission submission = call.submission;
    if (has_name) submission.name = text.c_str();
    call.named = add_named(self.named, name, submission);
    if (call.named == nullptr) throw py::error_already_set();
  }
  return !has_name || !self.shared->has_fresh() || !self.shared->is_fresh(call.key());
}

// How many rows a new output has.
std::int64_t rows_of_output(const UsualCall& call, std::int64_t given) {
  const std::int64_t size = call.engine.size();
  if (call.self.output != DirectOutput::kPartRows) return given * size;
  return given / size + (call.engine.rank() < given % size ? 1 : 0);
}

PyObject* make_output_with_rows(const UsualCall& call, const Tensor& tensor) {
  const TensorView& input = tensor.input;
  const std::int64_t rows = rows_of_output(call, input.shape[0]);
  PyObject* const shape = PyTuple_New(input.ndim);
  for (std::int32_t i = 0; shape != nullptr && i < input.ndim; ++i) {
    PyTuple_SET_ITEM(shape, i, PyLong_FromLongLong(i == 0 ? rows : input.shape[i]));
  }
  PyObject* const output =
      PyErr_Occurred() == nullptr
          ? PyObject_CallFunctionObjArgs(call.self.empty, tensor.given, shape, nullptr)
          : nullptr;
  Py_XDECREF(shape);
  return output;
}

// A new reference to the tensor for the result, None if there is none; nullptr with an exception.
PyObject* make_output(const UsualCall& call, const Tensor& tensor) {
  switch (call.self.output) {
    case DirectOutput::kNone:
    case DirectOutput::kCoreRows:
      return Py_NewRef(Py_None);
    case DirectOutput::kInput:
      return Py_NewRef(tensor.given);
    case DirectOutput::kLikeInput:
    case DirectOutput::kSameRows:
      return PyObject_CallOneArg(call.self.empty_like, tensor.given);
    case DirectOutput::kRootRows:
      if (call.engine.rank() != call.options.root) return Py_NewRef(Py_None);
      break;
    case DirectOutput::kAllRows:
    case DirectOutput::kPartRows:
      break;
  }
  return make_output_with_rows(call, tensor);
}

// Opens a tensor and its output.
bool open(const UsualCall& call, Tensor& tensor, hp_tensor& described) {
  const DirectFunction& self = call.self;
  if (self.kind.api != nullptr && !self.overwrites() &&
      !is_false(PyObject_GetAttr(tensor.given, names->requires_grad))) {
    return false;
  }
  const TensorView& input = tensor.input;
  if (!open(self.kind, tensor.given, self.overwrites(), tensor.input)) return false;
  if (self.has_rows() && input.ndim == 0) return false;
  tensor.output = make_output(call, tensor);
  if (tensor.output == nullptr) return false;
  const bool is_new = !self.overwrites() && tensor.output != Py_None;
  if (is_new && !open(self.kind, tensor.output, true, tensor.made)) return false;
  void* const output = self.overwrites() ? input.data : tensor.made.data;
  described = {input.data, output, input.shape, input.ndim, 0};
  return true;
}

// Opens the tensor, or those of a group, which have one dtype. `values`: the arguments.
bool open_tensors(UsualCall& call, PyObject* const* values) {
  if (call.self.takes == Takes::kNothing) {
    call.input = Py_NewRef(Py_None);
    call.output = Py_NewRef(Py_None);
    call.tensors = {};
    call.described = {};
    return true;
  }
  PyObject* const given = values[0];
  if (call.self.takes == Takes::kTensor) {
    call.input = Py_NewRef(given);
    call.one_tensor.given = given;
    if (!open(call, call.one_tensor, call.one_described)) return false;
    call.output = Py_NewRef(call.one_tensor.output);
    return true;
  }
  if (!PyList_CheckExact(given) && !PyTuple_CheckExact(given)) return false;
  call.input = PySequence_Tuple(given);
  const Py_ssize_t count = call.input == nullptr ? 0 : PyTuple_GET_SIZE(call.input);
  if (count == 0 || count > std::numeric_limits<std::int32_t>::max()) return false;
  call.more_tensors.resize(static_cast<std::size_t>(count));
  call.more_described.resize(static_cast<std::size_t>(count));
  call.tensors = call.more_tensors;
  call.described = call.more_described;
  call.output = PyList_New(count);
  if (call.output == nullptr) return false;
  for (std::size_t i = 0; i < call.tensors.size(); ++i) {
    Tensor& tensor = call.tensors[i];
    tensor.given = PyTuple_GET_ITEM(call.input, i);
    if (!open(call, tensor, call.described[i]) ||
        tensor.input.dtype != call.tensors.front().input.dtype) {
      return false;
    }
    PyList_SET_ITEM(call.output, i, Py_NewRef(tensor.output));
  }
  return true;
}

// Whether it is a usual one. `given`: the number of arguments by position. close() follows in
// either case.
bool open(UsualCall& call, PyObject* const* values, Py_ssize_t given, PyObject* keywords) {
  const DirectFunction& self = call.self;
  if (!take_options(self, values, given, keywords, call.options)) return false;
  if (!open_tensors(call, values)) return false;
  hp_submission& submission = call.submission;
  submission.struct_size = sizeof submission;
  submission.op = self.operation;
  submission.dtype = call.tensors.empty() ? 0 : call.tensors.front().input.dtype;
  submission.reduce_op = call.options.reduction;
  submission.root = std::max(call.options.root, 0);
  submission.tag = std::max(call.options.tag, 0);
  submission.device = -1;
  submission.prescale = submission.postscale = 1.0;
  submission.tensors = call.described.data();
  submission.tensor_count = static_cast<std::int32_t>(call.described.size());
  submission.pool_thread = is_pool_thread() ? 1 : 0;
  return find_operation(call);
}

void close(UsualCall& call) {
  for (Tensor& tensor : call.tensors) {
    close(tensor.input);
    close(tensor.made);
    Py_XDECREF(tensor.output);
  }
  Py_XDECREF(call.named);
  Py_XDECREF(call.input);
  Py_XDECREF(call.output);
  Py_DECREF(call.engine_object);
}

PyObject* fail(const UsualCall& call, hp_status status) {
  const py::object error = make_error(status, hp_last_error());
  return PyObject_CallOneArg(call.self.failed, error.ptr());
}

DirectStart start_of(const UsualCall& call) {
  const DirectFunction& self = call.self;
  return {self.calls, call.engine_object, self.failed, self.collect, call.input, call.output};
}

// An operation that is in flight when the core returns: from now on its tensors are kept.
PyObject* track(const UsualCall& call, hp_handle handle) {
  return track_operation(*call.self.shared, start_of(call), handle, call.key());
}

// Calls start(instance) with the tensors of a call.
template <typename Start>
hp_status submit(const UsualCall& call, Start&& start) {
  hp_instance instance = {};
  instance.struct_size = sizeof instance;
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  if (call.described.size() == 1) {
    instance.inputs = &call.described.front().input;
    instance.outputs = &call.described.front().output;
  } else {
    for (const hp_tensor& tensor : call.described) {
      inputs.push_back(tensor.input);
      outputs.push_back(tensor.output);
    }
    instance.inputs = inputs.data();
    instance.outputs = outputs.data();
  }
  instance.pool_thread = call.submission.pool_thread;
  std::shared_ptr<hp_prepared> prepared;
  const hp_status status = named_operation(call.named).operation.on(call.engine, prepared);
  instance.prepared = prepared.get();
  return status == HP_OK ? start(instance) : status;
}

// The result of a blocking call; on a failure, the exception.
PyObject* perform(const UsualCall& call) {
  hp_handle handle = 0;
  const hp_status status = submit(
      call, [&](const hp_instance& instance) { return call.engine.perform(instance, handle); });
  if (status == HP_IN_PROGRESS) {
    PyObject* const operation = track(call, handle);
    PyObject* const result = operation == nullptr ? nullptr : wait_for(operation);
    Py_XDECREF(operation);
    return result;
  }
  if (status != HP_OK) {
    PyObject* const exception = fail(call, status);
    if (handle != 0) hp_release(call.engine.get(), handle);
    return exception;
  }
  call.self.shared->waited();
  if (handle == 0) return Py_NewRef(call.output);
  PyObject* const result = result_of(start_of(call), handle);
  hp_release(call.engine.get(), handle);
  return result;
}

// The handle of an operation that is started; on a failure, the exception.
PyObject* start(const UsualCall& call) {
  hp_handle handle = 0;
  hp_engine* const engine = call.engine.get();
  std::int32_t accepted = 0;
  const hp_status status = submit(call, [&](const hp_instance& instance) {
    return hp_start(engine, &instance, 1, &handle, &accepted);
  });
  if (status != HP_OK) return fail(call, status);
  PyObject* const operation = track(call, handle);
  PyObject* const number = operation == nullptr ? nullptr : number_of(operation);
  Py_XDECREF(operation);
  return number;
}

}  // namespace

PyObject* call_directly(PyObject* object, PyObject* const* values, std::size_t count,
                        PyObject* keywords) {
  const auto& self = *reinterpret_cast<const DirectFunction*>(object);
#ifndef Py_GIL_DISABLED  // the parts that functions share have no lock
  if (self.shared->engine() != nullptr) {
    UsualCall usual(self);
    PyObject* result = nullptr;
    bool is_usual = false;
    try {
      is_usual = open(usual, values, PyVectorcall_NARGS(count), keywords);
      if (is_usual) result = self.blocks != 0 ? perform(usual) : start(usual);
    } catch (py::error_already_set& error) {
      error.restore();
      is_usual = true;
    } catch (const std::bad_alloc&) {
      PyErr_NoMemory();
      is_usual = true;
    }
    close(usual);
    if (is_usual) return result;
    PyErr_Clear();
  }
#endif
  return PyObject_Vectorcall(self.python, values, count, keywords);
}

void add_direct_calls(py::module_& module) {
  using namespace py::literals;
  names = new Names;  // as long as the process runs
  py::class_<DirectCalls>(module, "DirectCalls")
      .def(py::init<py::set, py::dict, py::object>(), "fresh"_a, "operations"_a, "numbers"_a)
      .def("use", &DirectCalls::use, "engine"_a);
  add_direct_function(module);
  add_direct_operation(module);
}

}  // namespace horoplug::python
