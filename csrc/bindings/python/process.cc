#include "process.h"

#include <pthread.h>
#include <unistd.h>

#include <chrono>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

#include "log_queue.h"

namespace py = pybind11;

namespace horoplug::python {

std::atomic<int> fork_generation{0};

void call_and_release(PyObject* function) {
  const PyGILState_STATE state = PyGILState_Ensure();
  PyObject* const result = PyObject_CallNoArgs(function);
  if (result == nullptr) PyErr_WriteUnraisable(function);
  Py_XDECREF(result);
  Py_DECREF(function);
  PyGILState_Release(state);
}

namespace {

// Ends a process whose exit takes too long. Never destroyed: a thread reads it during the exit.
struct ExitGuard {
  std::once_flag set;
  double seconds = 0;
  std::string text;

  [[noreturn]] void end() const {
    [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text.data(), text.size());
    ::_exit(1);
  }
};
ExitGuard& exit_guard = *new ExitGuard;

void guard_exit(double seconds, const std::string& text) {
  std::call_once(exit_guard.set, [&] {
    exit_guard.seconds = seconds;
    exit_guard.text = text + "\n";
    // Functions that are registered later run earlier.
    const int refused = Py_AtExit([] {
      if (exit_guard.seconds <= 0) exit_guard.end();
      std::thread([] {
        std::this_thread::sleep_for(std::chrono::duration<double>(exit_guard.seconds));
        exit_guard.end();
      }).detach();
    });
    if (refused != 0) throw std::runtime_error("too many functions are registered for the exit");
  });
}

}  // namespace

void add_process(py::module_& module) {
  using namespace py::literals;
  pthread_atfork(nullptr, nullptr, [] { ++fork_generation; });
  py::module_::import("atexit").attr("register")(py::cpp_function([] {
    without_gil([] {
      LogQueue::close_all();
      return 0;
    });
  }));
  module.def("guard_exit", &guard_exit, "seconds"_a, "text"_a);
}

}  // namespace horoplug::python
