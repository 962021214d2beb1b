// DirectFunction: a callable of C in place of a public function written in Python, which it knows.
//
// It performs the usual call itself: it reads the tensor, has the core perform the operation, and
// returns the result, without a frame, a tuple or a dictionary of Python. Any other call it passes
// on to the function written in Python, with the same arguments; so it is that function that says
// what is wrong with a call. A call is usual if
//
//   - the engine runs, and the program has waited for all operations that have a name;
//   - the only argument by position is the tensor, and the others are `name` (a string of at most
//     kLongestName bytes) and `op` (an int; not Adasum), or none;
//   - the tensor is of the class itself, not of a subclass, and in host memory; it has elements,
//     which lie there as they are, in row-major order, and are integers or floating-point numbers;
//     it is writable if it is overwritten;
//   - nothing differentiates the operation: it overwrites the tensor, or that needs no gradient.
#include "direct_call.h"

#include <structmember.h>

#include <array>
#include <cstdint>
#include <cstring>

#include "dlpack_layout.h"
#include "engine.h"
#include "errors.h"
#include "horoplug/horoplug.h"
#include "program_threads.h"

namespace py = pybind11;

namespace horoplug::python {

void DirectCalls::use(py::object engine) {
  engine_ = engine.is_none() ? nullptr : &engine.cast<Engine&>();
  engine_object_ = std::move(engine);
}

namespace {

constexpr std::size_t kLongestName = 200;
constexpr std::int64_t kNoDtype = -1;

// ---- tensors ----

// A tensor as hp_submission describes it. Not RAII: see close().
struct View {
  void* data = nullptr;
  const std::int64_t* shape = nullptr;
  std::int32_t ndim = 0;
  std::int64_t dtype = kNoDtype;
  Py_buffer buffer = {};
};

bool has_elements(const std::int64_t* shape, std::int32_t ndim) {
  for (std::int32_t i = 0; i < ndim; ++i) {
    if (shape[i] == 0) return false;
  }
  return true;
}

bool is_row_major(const DlTensor& tensor) {
  if (tensor.strides == nullptr) return true;
  std::int64_t expected = 1;
  for (std::int32_t i = tensor.ndim; i-- > 0;) {
    if (tensor.shape[i] != 1 && tensor.strides[i] != expected) return false;
    expected *= tensor.shape[i];
  }
  return true;
}

// Complex numbers and truth values have rules of their own.
std::int64_t dtype_of(const DlDataType& type) {
  constexpr std::uint8_t kComplex = 5, kBool = 6;
  if (type.lanes != 1 || type.code == kComplex || type.code == kBool) return kNoDtype;
#define HP_DTYPE(number, NAME, Name, name, bytes, family, ctype, mantissa, nccl, since, mpi, \
                 numpy, dlpack, tf, xla)                                                     \
  if (type.code == (dlpack) && type.bits == 8 * (bytes)) return number;
#include "horoplug/dtypes.def"
  return kNoDtype;
}

// Of the native byte order, as the module struct writes it.
std::int64_t dtype_of(const Py_buffer& buffer) {
  constexpr std::uint8_t kSigned = 0, kUnsigned = 1, kFloat = 2;
  const char* const format = buffer.format;
  if (format == nullptr || format[0] == 0 || format[1] != 0) return kNoDtype;
  const auto bits = static_cast<std::uint8_t>(8 * buffer.itemsize);
  if (std::strchr("bhilq", format[0]) != nullptr) return dtype_of({kSigned, bits, 1});
  if (std::strchr("BHILQ", format[0]) != nullptr) return dtype_of({kUnsigned, bits, 1});
  if (std::strchr("efd", format[0]) != nullptr) return dtype_of({kFloat, bits, 1});
  return kNoDtype;
}

// Whether a method of a tensor or an attribute is false.
bool is_false(PyObject* answer) {
  const bool is = answer == Py_False;
  Py_XDECREF(answer);
  return is;
}

struct Names {
  PyObject* name = PyUnicode_InternFromString("name");
  PyObject* op = PyUnicode_InternFromString("op");
  PyObject* is_neg = PyUnicode_InternFromString("is_neg");
  PyObject* requires_grad = PyUnicode_InternFromString("requires_grad");
};
const Names* names = nullptr;

// ---- the type ----

struct DirectFunction {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject* dict;
  PyObject* weak_references;
  PyObject* python;       // the function that it stands for
  PyObject* calls;        // DirectCalls
  PyObject* tensor_type;  // of the tensors of usual calls
  PyObject* exchange;     // None: its tensors have the buffer protocol; else a capsule of DLPack
  PyObject* empty_like;   // makes the output; None: it is the tensor
  PyObject* unfinished;   // (engine, handle, tensor, output, name): waits for the operation
  PyObject* failed;       // (error): raises the exception
  PyObject* prefix;       // of the names of operations, such as "allreduce."
  const DirectCalls* shared;
  const DlExchange* api;
  std::int32_t operation;
  std::uint32_t reductions;  // the bits of those of usual calls
};

constexpr std::array kObjects = {
    &DirectFunction::dict,        &DirectFunction::python,   &DirectFunction::calls,
    &DirectFunction::tensor_type, &DirectFunction::exchange, &DirectFunction::empty_like,
    &DirectFunction::unfinished,  &DirectFunction::failed,   &DirectFunction::prefix};

// Describes a tensor if it is that of a usual call. Leaves no exception.
bool open(const DirectFunction& self, PyObject* tensor, bool writable, View& view) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(tensor)) != self.tensor_type) return false;
  if (self.api == nullptr) {
    const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(tensor, &view.buffer, flags) == 0) {
      view.data = view.buffer.buf;
      static_assert(sizeof(Py_ssize_t) == sizeof(std::int64_t));
      view.shape = reinterpret_cast<const std::int64_t*>(view.buffer.shape);
      view.ndim = view.buffer.ndim;
      view.dtype = dtype_of(view.buffer);
    }
  } else {
    DlTensor found{};
    if (self.api->describe(tensor, &found) == 0 && found.device.type == kDlCpu &&
        found.data != nullptr && is_row_major(found)) {
      view.data = static_cast<char*>(found.data) + found.byte_offset;
      view.shape = found.shape;
      view.ndim = found.ndim;
      view.dtype = dtype_of(found.dtype);
      if (!is_false(PyObject_CallMethodNoArgs(tensor, names->is_neg))) view.dtype = kNoDtype;
    }
  }
  if (PyErr_Occurred() != nullptr) PyErr_Clear();
  return view.dtype != kNoDtype && has_elements(view.shape, view.ndim);
}

// Not a destructor: the end of the interpreter ends a daemon thread by unwinding, without the GIL.
void close(View& view) {
  if (view.buffer.obj != nullptr) PyBuffer_Release(&view.buffer);
}

// The options of a usual call.
struct Options {
  std::int32_t reduction = HP_AVERAGE;
  std::array<char, 64 + kLongestName + 1> text;  // the name on the wire
  const char* name = nullptr;
};

bool take_name(const DirectFunction& self, PyObject* given, Options& options) {
  Py_ssize_t size = 0, before = 0;
  if (!PyUnicode_CheckExact(given) || PyUnicode_GET_LENGTH(given) == 0) return false;
  const char* const text = PyUnicode_AsUTF8AndSize(given, &size);
  if (text == nullptr) {
    PyErr_Clear();
    return false;
  }
  if (static_cast<std::size_t>(size) > kLongestName || std::memchr(text, 0, size) != nullptr) {
    return false;
  }
  const char* const prefix = PyUnicode_AsUTF8AndSize(self.prefix, &before);
  std::memcpy(options.text.data(), prefix, before);
  std::memcpy(options.text.data() + before, text, size + 1);
  options.name = options.text.data();
  return true;
}

bool take_reduction(const DirectFunction& self, PyObject* given, Options& options) {
  if (!PyLong_CheckExact(given)) return false;
  int overflow = 0;
  const long value = PyLong_AsLongAndOverflow(given, &overflow);
  if (value < 0 || value >= HP_REDUCE_OP_COUNT || (self.reductions >> value & 1) == 0) return false;
  options.reduction = static_cast<std::int32_t>(value);
  return true;
}

bool take_options(const DirectFunction& self, PyObject* const* values, PyObject* keywords,
                  Options& options) {
  const Py_ssize_t count = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* const keyword = PyTuple_GET_ITEM(keywords, i);
    if (keyword == names->name) {
      if (!take_name(self, values[i], options)) return false;
    } else if (keyword != names->op || !take_reduction(self, values[i], options)) {
      return false;
    }
  }
  return true;
}

// The result of an operation that has ended; on a failure, the exception.
PyObject* finish(const DirectFunction& self, hp_engine* engine, hp_handle handle, hp_status status,
                 PyObject* tensor, PyObject* output, const char* name) {
  if (status == HP_IN_PROGRESS) {
    return PyObject_CallFunction(self.unfinished, "OKOOz", self.shared->engine_object().ptr(),
                                 static_cast<unsigned long long>(handle), tensor, output, name);
  }
  if (status == HP_OK) {
    hp_release(engine, handle);
    self.shared->waited();
    return Py_NewRef(output);
  }
  const py::object error = make_error(status, hp_last_error());
  if (handle != 0) hp_release(engine, handle);
  return PyObject_CallOneArg(self.failed, error.ptr());
}

// Performs a usual call. Returns false if it is not one.
bool perform(const DirectFunction& self, PyObject* const* values, Py_ssize_t count,
             PyObject* keywords, PyObject*& result) {
  Options options;
  const DirectCalls& shared = *self.shared;
  if (count != 1 || shared.engine() == nullptr || !shared.has_waited() ||
      !take_options(self, values + 1, keywords, options)) {
    return false;
  }
  PyObject* const tensor = values[0];
  const bool in_place = self.empty_like == Py_None;
  View input, made;
  const bool differentiates =
      self.api != nullptr && !in_place && !is_false(PyObject_GetAttr(tensor, names->requires_grad));
  bool is_usual = !differentiates && open(self, tensor, in_place, input);
  PyObject* output = nullptr;
  if (is_usual) {
    output = in_place ? Py_NewRef(tensor) : PyObject_CallOneArg(self.empty_like, tensor);
    is_usual = output != nullptr && (in_place || open(self, output, true, made));
  }
  if (is_usual) {
    const hp_tensor described = {input.data, in_place ? input.data : made.data, input.shape,
                                 input.ndim, 0};
    hp_submission submission = {};
    submission.struct_size = sizeof submission;
    submission.op = self.operation;
    submission.dtype = static_cast<std::int32_t>(input.dtype);
    submission.reduce_op = options.reduction;
    submission.device = -1;
    submission.prescale = submission.postscale = 1.0;
    submission.tensors = &described;
    submission.tensor_count = 1;
    submission.name = options.name;
    submission.pool_thread = is_pool_thread() ? 1 : 0;
    Engine& engine = *shared.engine();
    hp_handle handle = 0;
    const hp_status status = engine.perform(submission, handle);
    result = finish(self, engine.get(), handle, status, tensor, output, options.name);
  }
  close(input);
  close(made);
  Py_XDECREF(output);
  if (!is_usual) PyErr_Clear();
  return is_usual;
}

PyObject* call(PyObject* object, PyObject* const* values, std::size_t count, PyObject* keywords) {
  const auto& self = *reinterpret_cast<const DirectFunction*>(object);
#ifndef Py_GIL_DISABLED  // the parts that functions share have no lock
  try {
    PyObject* result = nullptr;
    if (perform(self, values, PyVectorcall_NARGS(count), keywords, result)) return result;
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  }
#endif
  return PyObject_Vectorcall(self.python, values, count, keywords);
}

// ---- what every type needs ----

PyObject* create(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *python, *calls, *tensor_type, *exchange, *empty_like, *unfinished, *failed, *prefix;
  int operation = 0;
  unsigned int reductions = 0;
  if (PyArg_ParseTuple(args, "OOOOOOOUiI", &python, &calls, &tensor_type, &exchange, &empty_like,
                       &unfinished, &failed, &prefix, &operation, &reductions) == 0) {
    return nullptr;
  }
  const DlExchange* api = nullptr;
  if (exchange != Py_None) {
    api = static_cast<const DlExchange*>(PyCapsule_GetPointer(exchange, DlExchange::kName));
    if (api == nullptr) return nullptr;
    while (api != nullptr && api->major != kDlMajor) api = api->previous;
    if (api == nullptr || api->describe == nullptr) {
      PyErr_SetString(PyExc_ValueError, "the tensors cannot be described by DLPack 1");
      return nullptr;
    }
  }
  auto* const self = reinterpret_cast<DirectFunction*>(type->tp_alloc(type, 0));
  if (self == nullptr) return nullptr;
  self->vectorcall = call;
  self->python = Py_NewRef(python);
  self->calls = Py_NewRef(calls);
  self->tensor_type = Py_NewRef(tensor_type);
  self->exchange = Py_NewRef(exchange);
  self->empty_like = Py_NewRef(empty_like);
  self->unfinished = Py_NewRef(unfinished);
  self->failed = Py_NewRef(failed);
  self->prefix = Py_NewRef(prefix);
  self->shared = &py::handle(calls).cast<const DirectCalls&>();
  self->api = api;
  self->operation = operation;
  self->reductions = reductions;
  return reinterpret_cast<PyObject*>(self);
}

int traverse(PyObject* object, visitproc visit, void* arg) {
  auto* const self = reinterpret_cast<DirectFunction*>(object);
  for (auto member : kObjects) Py_VISIT(self->*member);
  Py_VISIT(Py_TYPE(object));
  return 0;
}

int clear(PyObject* object) {
  auto* const self = reinterpret_cast<DirectFunction*>(object);
  for (auto member : kObjects) Py_CLEAR(self->*member);
  return 0;
}

void destroy(PyObject* object) {
  PyObject_GC_UnTrack(object);
  if (reinterpret_cast<DirectFunction*>(object)->weak_references != nullptr) {
    PyObject_ClearWeakRefs(object);
  }
  clear(object);
  PyTypeObject* const type = Py_TYPE(object);
  type->tp_free(object);
  Py_DECREF(type);
}

// As a function of Python, it is a method of the objects of a class of which it is an attribute.
PyObject* bind(PyObject* self, PyObject* of, PyObject*) {
  return of == nullptr || of == Py_None ? Py_NewRef(self) : PyMethod_New(self, of);
}

// As a function of Python, it is pickled by its name, and is its own copy.
PyObject* reduce(PyObject* self, PyObject*) { return PyObject_GetAttrString(self, "__qualname__"); }

PyObject* represent(PyObject* self) {
  PyObject* const name = PyObject_GetAttrString(self, "__qualname__");
  if (name == nullptr) return nullptr;
  PyObject* const text = PyUnicode_FromFormat("<function %U>", name);
  Py_DECREF(name);
  return text;
}

std::array methods = {PyMethodDef{"__reduce__", reduce, METH_NOARGS, nullptr}, PyMethodDef{}};
std::array members = {
    PyMemberDef{"__vectorcalloffset__", T_PYSSIZET, offsetof(DirectFunction, vectorcall), READONLY,
                nullptr},
    PyMemberDef{"__dictoffset__", T_PYSSIZET, offsetof(DirectFunction, dict), READONLY, nullptr},
    PyMemberDef{"__weaklistoffset__", T_PYSSIZET, offsetof(DirectFunction, weak_references),
                READONLY, nullptr},
    PyMemberDef{}};
std::array attributes = {
    PyGetSetDef{"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, nullptr, nullptr},
    PyGetSetDef{}};

template <typename Function>
PyType_Slot slot(int number, Function* function) {
  return {number, reinterpret_cast<void*>(function)};
}

std::array slots = {slot(Py_tp_new, create),
                    slot(Py_tp_call, PyVectorcall_Call),
                    slot(Py_tp_traverse, traverse),
                    slot(Py_tp_clear, clear),
                    slot(Py_tp_dealloc, destroy),
                    slot(Py_tp_descr_get, bind),
                    slot(Py_tp_repr, represent),
                    PyType_Slot{Py_tp_methods, methods.data()},
                    PyType_Slot{Py_tp_members, members.data()},
                    PyType_Slot{Py_tp_getset, attributes.data()},
                    PyType_Slot{0, nullptr}};
PyType_Spec spec = {"horoplug._native.DirectFunction", sizeof(DirectFunction), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
                    slots.data()};

}  // namespace

void add_direct_calls(py::module_& module) {
  using namespace py::literals;
  names = new Names;  // as long as the process runs
  py::class_<DirectCalls>(module, "DirectCalls")
      .def(py::init<py::set>(), "fresh"_a)
      .def("use", &DirectCalls::use, "engine"_a);
  const auto type = py::reinterpret_steal<py::object>(PyType_FromSpec(&spec));
  if (!type) throw py::error_already_set();
  module.attr("DirectFunction") = type;
}

}  // namespace horoplug::python
