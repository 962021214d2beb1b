// What the module has to know about the process that it runs in: the GIL, forks, and the exit.
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>

namespace horoplug::python {

// Calls a function that returns a value, without the GIL. No destructor takes the GIL back: in a
// daemon thread at interpreter exit that ends the thread by unwinding, which must not start in a
// destructor.
template <typename Function>
auto without_gil(Function&& function) {
  PyThreadState* const state = PyEval_SaveThread();
  const auto result = function();
  PyEval_RestoreThread(state);
  return result;
}

// Number of forks between the process that loaded the module and this one. Objects whose threads or
// CUDA resources do not exist in a forked child record it when they are created.
extern std::atomic<int> fork_generation;

// Calls a Python function without arguments and drops the reference to it. Takes the GIL; an
// exception is reported as unraisable.
void call_and_release(PyObject* function);

// Begins to count forks, and adds guard_exit to the module.
void add_process(pybind11::module_& module);

}  // namespace horoplug::python
