#include "program_threads.h"

#include <pybind11/pybind11.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <string>
#include <utility>

namespace py = pybind11;

// No function of this file runs Python code: the interpreter calls the handlers of signals between
// any two instructions of Python code, and their exceptions belong to the caller's wait. The
// properties and functions of threading are Python code. Hence the module's dictionary of running
// threads and the attributes of its objects are read in place of them.
namespace horoplug {
namespace {

// Without the interpreter's lock, a thread may leave a frame while another one reads it, which
// CPython does not make safe. Then frames are not read, and nothing is known of what threads do in
// Python.
#ifdef Py_GIL_DISABLED
constexpr bool kReadsFrames = false;
#else
constexpr bool kReadsFrames = true;
#endif

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

// The item of a dictionary; null if there is none. Not a borrowed reference, since another thread
// may remove the item.
py::object item(PyObject* dictionary, const char* name) {
  PyObject* const found = PyMapping_GetItemString(dictionary, name);
  if (found == nullptr) PyErr_Clear();
  return py::reinterpret_steal<py::object>(found);
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
  return names == nullptr ? py::object() : item(names, name);
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
  const py::object function = global("sys", "_current_frames");
  if (!function || !kReadsFrames) return {};
  auto frames = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(function.ptr()));
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

// The text of an attribute; empty if it has none.
std::string text_of(py::handle object, const char* name) {
  const py::object text = attribute(object, name);
  return text && PyUnicode_Check(text.ptr()) ? py::str(text).cast<std::string>() : std::string();
}

// The innermost frame of a thread; null if it runs no Python code.
py::object frame_of(const py::dict& frames, py::handle ident) {
  PyObject* const frame = PyDict_GetItemWithError(frames.ptr(), ident.ptr());
  if (frame == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return py::reinterpret_borrow<py::object>(frame);
}

bool is_in_module(const py::object& frame, const char* name) {
  if (!frame) return false;
  const py::object names = attribute(frame, "f_globals");
  if (!names || !PyDict_Check(names.ptr())) return false;
  const py::object module = item(names.ptr(), "__name__");
  return module && PyUnicode_Check(module.ptr()) &&
         PyUnicode_CompareWithASCIIString(module.ptr(), name) == 0;
}

// Whether a thread waits for the next call of its executor: its innermost function is then that of
// the module itself. It submits nothing unless another thread gives it something to do.
bool is_idle_executor_thread(const py::dict& frames, py::handle ident) {
  return is_in_module(frame_of(frames, ident), "concurrent.futures.thread");
}

// A local variable of a frame; null if there is none. Reading it runs no Python code.
py::object local(const py::object& frame, const char* name) {
  const py::object locals = attribute(frame, "f_locals");
  return locals ? item(locals.ptr(), name) : py::object();
}

bool is_of_this_process(std::int64_t id) {
  return ::syscall(SYS_tgkill, ::getpid(), static_cast<pid_t>(id), 0) == 0;
}

// The threads that Python's threading module knows, and what they wait for in it.
class Threads {
 public:
  Threads() {
    const py::object main_thread = global("threading", "_main_thread");
    for (const auto& [ident, thread] : threads_) {
      const py::object id = attribute(thread, "_native_id");
      if (!id || !PyLong_Check(id.ptr())) continue;  // it does not run yet
      Thread& entry = list_.emplace_back();
      entry.object = thread.ptr();
      entry.ident = ident.cast<std::int64_t>();
      entry.id = id.cast<std::int64_t>();
      // In a forked child, Python keeps the id that its main thread had in the parent.
      if (thread.is(main_thread) && !is_of_this_process(entry.id)) entry.id = ::getpid();
      entry.daemon = attribute(thread, "_daemonic").is(py::bool_(true));
      entry.idle = is_idle_executor_thread(frames_, ident);
      const py::object frame = frame_of(frames_, ident);
      entry.in_threading = is_in_module(frame, "threading");
      if (entry.in_threading) read_wait(frame, entry);
    }
  }

  std::vector<std::int64_t> may_submit() const {
    std::vector<std::int64_t> ids;
    for (const Thread& thread : list_) {
      if (!thread.daemon && !thread.idle) ids.push_back(thread.id);
    }
    return ids;
  }

  // Those of the threads that may wait outside of the threading module.
  std::vector<std::int64_t> outside(const std::vector<std::int64_t>& idents) const {
    std::vector<std::int64_t> ids;
    for (const Thread& thread : list_) {
      const bool is_given = std::find(idents.begin(), idents.end(), thread.ident) != idents.end();
      if (kReadsFrames && is_given && !thread.in_threading) ids.push_back(thread.id);
    }
    return ids;
  }

  // The threads that wait for the end of one of these, or of one that does so itself.
  std::vector<std::int64_t> held_by(std::vector<std::int64_t> ids) const {
    std::vector<std::int64_t> held;
    const auto contains = [](const std::vector<std::int64_t>& list, std::int64_t id) {
      return std::find(list.begin(), list.end(), id) != list.end();
    };
    for (std::size_t next = 0; next < ids.size(); ++next) {
      for (const Thread& thread : list_) {
        if (contains(ids, thread.id) || !thread.waits_for_end_of(find(ids[next]))) continue;
        held.push_back(thread.id);
        ids.push_back(thread.id);
      }
    }
    return held;
  }

 private:
  struct Thread {
    PyObject* object = nullptr;
    std::int64_t ident = 0, id = 0;
    bool daemon = false, idle = false, in_threading = false;
    py::object joined;              // waits for the end of this thread, without a limit
    bool ends_the_program = false;  // waits for the end of all threads that are no daemons

    bool waits_for_end_of(const Thread* other) const {
      if (other == nullptr) return false;
      return joined.ptr() == other->object || (ends_the_program && !other->daemon);
    }
  };

  const Thread* find(std::int64_t id) const {
    for (const Thread& thread : list_) {
      if (thread.id == id) return &thread;
    }
    return nullptr;
  }

  // Thread.join() waits in a function of its own before Python 3.13.
  static void read_wait(const py::object& frame, Thread& entry) {
    const std::string function = text_of(attribute(frame, "f_code"), "co_name");
    entry.ends_the_program = function == "_shutdown";
    if (function != "join" && function != "_wait_for_tstate_lock") return;
    const py::object timeout = local(frame, "timeout");
    const bool is_endless =
        timeout &&
        (timeout.is_none() || (PyLong_Check(timeout.ptr()) && timeout.equal(py::int_(-1))));
    if (is_endless) entry.joined = local(frame, "self");
  }

  const py::dict frames_ = current_frames();
  const py::dict threads_ = running_threads();
  std::vector<Thread> list_;
};

void expect(hp_engine* engine, const Threads& threads) {
  const std::vector<std::int64_t> ids = threads.may_submit();
  hp_expect_threads(engine, ids.data(), static_cast<std::int32_t>(ids.size()));
}

void hold(hp_engine* engine, const Threads& threads, std::vector<std::int64_t> by) {
  const std::vector<std::int64_t> held = threads.held_by(std::move(by));
  hp_hold_threads(engine, held.data(), static_cast<std::int32_t>(held.size()));
}

std::int64_t own_id() { return ::syscall(SYS_gettid); }

}  // namespace

bool is_pool_thread() {
  thread_local const bool is_pool = is_pool_thread_now();
  return is_pool;
}

void expect_threads(hp_engine* engine) {
  const Threads threads;
  expect(engine, threads);
  hold(engine, threads, {own_id()});
}

void note_waits(hp_engine* engine, const std::vector<hp_handle>& handles,
                const std::vector<std::int64_t>& idents) {
  const Threads threads;
  std::vector<std::int64_t> waiting = threads.outside(idents);
  expect(engine, threads);
  std::vector<std::int64_t> held = threads.held_by(waiting);
  waiting.push_back(own_id());
  waiting.insert(waiting.end(), held.begin(), held.end());
  for (const hp_handle handle : handles) {
    hp_note_wait(engine, handle, waiting.data(), static_cast<std::int32_t>(waiting.size()));
  }
}

}  // namespace horoplug
