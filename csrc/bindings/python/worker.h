// A thread that calls Python functions.
#pragma once

#include <pybind11/pybind11.h>

#include "horoplug/horoplug.h"
#include "process.h"

namespace horoplug::python {

class Worker {
 public:
  Worker();
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Raises Error in a forked child, to which the thread does not belong.
  hp_worker* get() const;
  void post(const pybind11::object& function);

 private:
  hp_worker* worker_ = nullptr;
  const int generation_ = fork_generation;
};

// Adds the class to the module.
void add_worker(pybind11::module_& module);

}  // namespace horoplug::python
