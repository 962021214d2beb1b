// DirectAllreduce: the method `allreduce(tensors, opts)` of the process groups of
// torch.distributed, in place of the one written in Python, which it knows.
//
// It performs the usual call itself, as DirectFunction does (direct_call.cc). Any other call it
// passes on to the method in Python, with the same arguments. A call is usual if
//
//   - the arguments are by position: a list of one tensor, and options of PyTorch's class;
//   - the options say that the caller waits, with the time limit of the group and a reduction that
//     the core has;
//   - the attribute `_direct` of the group is its DirectGroup, and the caller is not the thread
//   that
//     it names, whose operations have names of their own;
//   - the tensor is of the class itself, not of a subclass, and in host memory; it has elements,
//     which lie there as they are, in row-major order, and are integers or floating-point numbers;
//   - the calling thread is not being profiled.
#include "direct_allreduce.h"

#include <datetime.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <new>
#include <string>

#include "direct_tensor.h"
#include "dlpack_layout.h"
#include "engine.h"
#include "errors.h"
#include "horoplug/horoplug.h"
#include "object_type.h"
#include "program_threads.h"

namespace py = pybind11;

namespace horoplug::python {
namespace {

// What the calls of one group share.
struct DirectGroup {
  explicit DirectGroup(py::object of) : engine(of.cast<Engine&>()), engine_object(std::move(of)) {}

  Engine& engine;
  py::object engine_object;
  std::uint64_t callback_thread = PYTHREAD_INVALID_THREAD_ID;
  py::list kept;  // tensors that the core may still use
};
PyTypeObject* group_type = nullptr;

struct AttributeNames {
  PyObject* direct = PyUnicode_InternFromString("_direct");
  PyObject* blocks = PyUnicode_InternFromString("asyncOp");
  PyObject* limit = PyUnicode_InternFromString("timeout");
  PyObject* reduction = PyUnicode_InternFromString("reduceOp");
  PyObject* await = PyUnicode_InternFromString("_await_allreduce");
  PyObject* fail = PyUnicode_InternFromString("_fail_operation");
};
const AttributeNames* attribute_names = nullptr;

struct DirectAllreduce {
  PyObject head;
  vectorcallfunc vectorcall;
  PyObject* dict;
  PyObject* weak_references;
  PyObject* python;        // the method that it stands for
  PyObject* options_type;  // of usual calls
  PyObject* reductions;    // those of the core, by the hash of those of PyTorch
  PyObject* is_profiled;   // (): whether the calling thread is being profiled
  PyObject* tensor_type;
  PyObject* exchange;  // a capsule of DLPack
  TensorKind kind;

  static constexpr auto references() {
    using Self = DirectAllreduce;
    return std::array{&Self::dict,       &Self::python,      &Self::options_type,
                      &Self::reductions, &Self::is_profiled, &Self::tensor_type,
                      &Self::exchange};
  }
};

py::object take(PyObject* reference) { return py::reinterpret_steal<py::object>(reference); }

// PyTorch gives the time limit of the group as a negative one.
bool is_of_group(const py::object& limit) {
  return limit && PyDelta_Check(limit.ptr()) != 0 && PyDateTime_DELTA_GET_DAYS(limit.ptr()) < 0;
}

// The reduction of the core for usual options; -1: they are not usual.
std::int32_t usual_reduction(const DirectAllreduce& self, PyObject* options) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(options)) != self.options_type ||
      !is_false(PyObject_GetAttr(options, attribute_names->blocks)) ||
      !is_of_group(take(PyObject_GetAttr(options, attribute_names->limit)))) {
    return -1;
  }
  const py::object given = take(PyObject_GetAttr(options, attribute_names->reduction));
  const Py_hash_t kind = given ? PyObject_Hash(given.ptr()) : -1;
  const py::object key = kind < 0 ? py::object() : take(PyLong_FromSsize_t(kind));
  PyObject* const found = key ? PyDict_GetItemWithError(self.reductions, key.ptr()) : nullptr;
  return found == nullptr ? -1 : static_cast<std::int32_t>(PyLong_AsLong(found));
}

struct AllreduceCall {
  py::object direct;  // another thread may end the group meanwhile
  DirectGroup* group = nullptr;
  py::object tensor;  // another thread may change the list meanwhile
  TensorView view;    // needs no close(), since DLPack has described the tensor
  std::int32_t reduction = -1;
};

bool open(const DirectAllreduce& self, PyObject* const* values, AllreduceCall& call) {
  PyObject* const tensors = values[1];
  if (PyList_CheckExact(tensors) == 0 || PyList_GET_SIZE(tensors) != 1) return false;
  call.reduction = usual_reduction(self, values[2]);
  if (call.reduction < 0) return false;
  call.direct = take(PyObject_GetAttr(values[0], attribute_names->direct));
  if (!call.direct || Py_TYPE(call.direct.ptr()) != group_type) return false;
  call.group = &call.direct.cast<DirectGroup&>();
  if (call.group->callback_thread == PyThread_get_thread_ident()) return false;
  call.tensor = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(tensors, 0));
  return open(self.kind, call.tensor.ptr(), true, call.view) &&
         is_false(PyObject_CallNoArgs(self.is_profiled));
}

// What the method returns: None; nullptr with an exception.
PyObject* perform(const AllreduceCall& call, PyObject* group, PyObject* options) {
  std::int64_t elements = 1;
  for (std::int32_t i = 0; i < call.view.ndim; ++i) elements *= call.view.shape[i];
  // Tensors of the same number of elements fit, whatever their shapes.
  const hp_tensor tensor{call.view.data, call.view.data, &elements, 1, 0};
  hp_submission submission = {};
  submission.struct_size = sizeof submission;
  submission.op = HP_ALLREDUCE;
  submission.dtype = call.view.dtype;
  submission.reduce_op = call.reduction;
  submission.device = -1;
  submission.prescale = submission.postscale = 1.0;
  submission.tensors = &tensor;
  submission.tensor_count = 1;
  submission.pool_thread = is_pool_thread() ? 1 : 0;
  hp_handle handle = 0;
  try {
    handle = call.group->engine.perform(submission, false);
  } catch (py::error_already_set& error) {
    if (!is_core_error(error)) throw;
    return PyObject_CallMethodOneArg(group, attribute_names->fail, error.value().ptr());
  }
  if (handle == 0) Py_RETURN_NONE;
  const py::int_ number(handle);
  PyObject* const result = PyObject_CallMethodObjArgs(
      group, attribute_names->await, call.tensor.ptr(), number.ptr(), options, nullptr);
  // An interrupt may have come before anything else kept the tensor.
  if (result == nullptr) {
    const py::error_scope kept_error;
    call.group->kept.append(call.tensor);
  }
  return result;
}

PyObject* call_allreduce(PyObject* object, PyObject* const* values, std::size_t count,
                         PyObject* keywords) {
  const auto& self = *reinterpret_cast<const DirectAllreduce*>(object);
#ifndef Py_GIL_DISABLED  // as for direct calls
  if (PyVectorcall_NARGS(count) == 3 && keywords == nullptr) {
    try {
      AllreduceCall usual;
      if (open(self, values, usual)) return perform(usual, values[0], values[2]);
      PyErr_Clear();
    } catch (py::error_already_set& error) {
      error.restore();
      return nullptr;
    } catch (const std::bad_alloc&) {
      return PyErr_NoMemory();
    }
  }
#endif
  return PyObject_Vectorcall(self.python, values, count, keywords);
}

PyObject* create_allreduce(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *python, *tensor_type, *exchange, *options_type, *reductions, *is_profiled;
  if (PyArg_ParseTuple(args, "OO!OO!O!O", &python, &PyType_Type, &tensor_type, &exchange,
                       &PyType_Type, &options_type, &PyDict_Type, &reductions, &is_profiled) == 0) {
    return nullptr;
  }
  const DlExchange* const api = exchange_of(exchange);
  if (api == nullptr) return nullptr;
  auto* const self = reinterpret_cast<DirectAllreduce*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->vectorcall = call_allreduce;
  self->python = Py_NewRef(python);
  self->tensor_type = Py_NewRef(tensor_type);
  self->exchange = Py_NewRef(exchange);
  self->options_type = Py_NewRef(options_type);
  self->reductions = Py_NewRef(reductions);
  self->is_profiled = Py_NewRef(is_profiled);
  self->kind = {reinterpret_cast<PyTypeObject*>(tensor_type), api, false};
  return reinterpret_cast<PyObject*>(self);
}

}  // namespace

void add_direct_allreduce(py::module_& module) {
  using namespace py::literals;
  PyDateTime_IMPORT;
  attribute_names = new AttributeNames;  // as long as the process runs
  const py::class_<DirectGroup> of_group =
      py::class_<DirectGroup>(module, "DirectGroup")
          .def(py::init<py::object>(), "engine"_a)
          .def_readwrite("callback_thread", &DirectGroup::callback_thread);
  group_type = reinterpret_cast<PyTypeObject*>(of_group.ptr());
  FunctionType<DirectAllreduce>::add_to(module, "horoplug._native.DirectAllreduce",
                                        create_allreduce, Py_TPFLAGS_METHOD_DESCRIPTOR);
}

}  // namespace horoplug::python
