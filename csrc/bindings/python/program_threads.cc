#include "program_threads.h"

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

namespace py = pybind11;

// No function of this file runs Python code: the interpreter calls the handlers of signals between
// any two instructions of Python code, and their exceptions belong to the caller's wait. The
// properties and functions of threading are Python code. Hence the module's dictionary of running
// threads and the attributes of its objects are read in place of them.
namespace horoplug {
namespace {

// Null without an exception if there is none.
py::object attribute(py::handle object, const char* name) {
  const auto key = py::reinterpret_steal<py::object>(PyUnicode_InternFromString(name));
  if (!key) throw py::error_already_set();
  // Not PyObject_GetAttr, which calls a __getattr__ of Python code.
  auto value = py::reinterpret_steal<py::object>(PyObject_GenericGetAttr(object.ptr(), key.ptr()));
  if (!value) {
    if (PyErr_ExceptionMatches(PyExc_AttributeError) == 0) throw py::error_already_set();
    PyErr_Clear();
  }
  return value;
}

// An item of a module's namespace. Null if the module is not loaded, or has ended with the
// interpreter.
py::object global(const char* module, const char* name) {
  const auto key = py::reinterpret_steal<py::object>(PyUnicode_InternFromString(module));
  if (!key) throw py::error_already_set();
  const auto loaded = py::reinterpret_steal<py::object>(PyImport_GetModule(key.ptr()));
  if (!loaded) {
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    return {};
  }
  PyObject* const names = PyModule_Check(loaded.ptr()) ? PyModule_GetDict(loaded.ptr()) : nullptr;
  if (names == nullptr) return {};
  return py::reinterpret_borrow<py::object>(PyDict_GetItemString(names, name));
}

// The objects of threading for all threads that run, by their identifiers.
py::dict running_threads() {
  const py::object active = global("threading", "_active");
  if (!active || !PyDict_Check(active.ptr())) return {};
  // A copy, since other threads may come and go.
  auto copy = py::reinterpret_steal<py::dict>(PyDict_Copy(active.ptr()));
  if (!copy) throw py::error_already_set();
  return copy;
}

// The innermost frames of all threads, by their identifiers.
py::dict current_frames() {
  PyObject* const function = PySys_GetObject("_current_frames");
  if (function == nullptr) return {};
  auto frames = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(function));
  if (!frames) throw py::error_already_set();
  return frames;
}

bool is_pool_thread_now() {
  const auto ident = py::int_(PyThread_get_thread_ident());
  const py::dict threads = running_threads();
  PyObject* const thread = PyDict_GetItemWithError(threads.ptr(), ident.ptr());
  if (thread == nullptr) {
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    return true;
  }
  // threading has one of these for each thread of others that has asked for its own object.
  return global("threading", "_DummyThread").is(py::type::handle_of(thread));
}

// Whether a thread waits for the next call of its executor: its innermost function is then that of
// the module itself. It submits nothing unless another thread gives it something to do.
bool is_idle_executor_thread(const py::dict& frames, py::handle ident) {
  PyObject* const frame = PyDict_GetItemWithError(frames.ptr(), ident.ptr());
  if (frame == nullptr) {
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    return false;
  }
  const py::object names = attribute(frame, "f_globals");
  if (!names || !PyDict_Check(names.ptr())) return false;
  PyObject* const module = PyDict_GetItemString(names.ptr(), "__name__");
  return module != nullptr && PyUnicode_Check(module) &&
         PyUnicode_CompareWithASCIIString(module, "concurrent.futures.thread") == 0;
}

}  // namespace

bool is_pool_thread() {
  thread_local const bool is_pool = is_pool_thread_now();
  return is_pool;
}

void expect_threads(hp_engine* engine) {
  std::vector<std::int64_t> ids;
  const py::dict frames = current_frames();
  for (const auto& [ident, thread] : running_threads()) {
    const py::object id = attribute(thread, "_native_id");
    if (!id || !PyLong_Check(id.ptr())) continue;  // it does not run yet
    if (attribute(thread, "_daemonic").is(py::bool_(true))) continue;
    if (!is_idle_executor_thread(frames, ident)) ids.push_back(id.cast<std::int64_t>());
  }
  hp_expect_threads(engine, ids.data(), static_cast<std::int32_t>(ids.size()));
}

}  // namespace horoplug
