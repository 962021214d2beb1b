#include "direct_operation.h"

#include <array>

#include "engine.h"
#include "errors.h"
#include "object_type.h"

namespace py = pybind11;

namespace horoplug::python {
namespace {

struct DirectOperation {
  PyObject head;
  PyObject* calls;   // keeps `shared`
  PyObject* engine;  // keeps `running`
  PyObject* input;   // which the core reads
  PyObject* output;
  PyObject* failed;   // (error): raises the exception
  PyObject* collect;  // see DirectStart
  PyObject* number;   // the handle of the user
  const DirectCalls* shared;
  Engine* running;
  hp_handle handle;

  static constexpr auto references() {
    using Self = DirectOperation;
    return std::array{&Self::calls,  &Self::engine,  &Self::input, &Self::output,
                      &Self::failed, &Self::collect, &Self::number};
  }
  DirectStart start() const { return {calls, engine, failed, collect, input, output}; }
};

PyTypeObject* operation_type = nullptr;

void forget(const DirectOperation& self) {
  self.shared->waited();
  if (self.shared->forget(self.number)) self.running->release(self.handle);
}

PyObject* wait(PyObject* object, PyObject*) { return wait_for(object); }

PyObject* done(PyObject* object, PyObject*) {
  const DirectOperation& self = self_of<DirectOperation>(object);
  try {
    const bool is_done = self.running->poll(self.handle);
    if (is_done) self.shared->waited();
    return PyBool_FromLong(is_done ? 1 : 0);
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  }
}

PyObject* waitable(PyObject* object, PyObject*) { return Py_NewRef(object); }

// Tensors in host memory may be freed: the core does not use them any more when it is called.
PyObject* abandon(PyObject*, PyObject*) { Py_RETURN_NONE; }

std::array operation_methods = {PyMethodDef{"wait", wait, METH_NOARGS, nullptr},
                                PyMethodDef{"done", done, METH_NOARGS, nullptr},
                                PyMethodDef{"waitable", waitable, METH_O, nullptr},
                                PyMethodDef{"abandon", abandon, METH_NOARGS, nullptr},
                                PyMethodDef{}};
std::array operation_slots = {
    slot(Py_tp_traverse, traverse<DirectOperation>), slot(Py_tp_clear, clear<DirectOperation>),
    slot(Py_tp_dealloc, destroy<DirectOperation>),
    PyType_Slot{Py_tp_methods, operation_methods.data()}, PyType_Slot{0, nullptr}};
PyType_Spec operation_spec = {
    "horoplug._native.DirectOperation", sizeof(DirectOperation), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    operation_slots.data()};

}  // namespace

PyObject* result_of(const DirectStart& start, hp_handle handle) {
  if (start.collect == Py_None) return Py_NewRef(start.output);
  PyObject* const number = PyLong_FromLongLong(handle);
  if (number == nullptr) return nullptr;
  PyObject* const result = PyObject_CallFunctionObjArgs(start.collect, start.engine, number,
                                                        start.input, start.output, nullptr);
  Py_DECREF(number);
  return result;
}

PyObject* wait_for(PyObject* object) {
  const DirectOperation& self = self_of<DirectOperation>(object);
  const py::object kept = py::reinterpret_borrow<py::object>(object);
  try {
    self.running->wait(self.handle, -1);
    PyObject* const result = result_of(self.start(), self.handle);
    const py::error_scope kept_error;  // of result_of()
    forget(self);
    return result;
  } catch (py::error_already_set& error) {
    if (!is_core_error(error)) {  // such as an interrupt: the operation is still in flight
      error.restore();
      return nullptr;
    }
    const py::object value = error.value();
    forget(self);
    return PyObject_CallOneArg(self.failed, value.ptr());
  }
}

PyObject* number_of(PyObject* operation) {
  return Py_NewRef(self_of<DirectOperation>(operation).number);
}

PyObject* track_operation(const DirectCalls& shared, const DirectStart& start, hp_handle handle,
                          PyObject* key) {
  PyObject* const made = operation_type->tp_alloc(operation_type, 0);
  if (made == nullptr) return nullptr;
  DirectOperation& self = self_of<DirectOperation>(made);
  self.calls = Py_NewRef(start.calls);
  self.engine = Py_NewRef(start.engine);
  self.input = Py_NewRef(start.input);
  self.output = Py_NewRef(start.output);
  self.failed = Py_NewRef(start.failed);
  self.collect = Py_NewRef(start.collect);
  self.shared = &shared;
  self.running = &py::handle(start.engine).cast<Engine&>();
  self.handle = handle;
  self.number = shared.track(made);
  if (self.number == nullptr) {
    Py_DECREF(made);
    return nullptr;
  }
  if (key != nullptr) shared.submitted(key);
  return made;
}

void add_direct_operation(py::module_& module) {
  operation_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&operation_spec));
  if (operation_type == nullptr) throw py::error_already_set();
  module.attr("DirectOperation") = py::handle(reinterpret_cast<PyObject*>(operation_type));
}

}  // namespace horoplug::python
