#include "worker.h"

#include "errors.h"

namespace py = pybind11;

namespace horoplug::python {

Worker::Worker() { check(hp_worker_start(&worker_)); }

Worker::~Worker() {
  if (generation_ != fork_generation) return;  // the thread is the parent's
  without_gil([this] {
    hp_worker_free(worker_);
    return 0;
  });
}

hp_worker* Worker::get() const {
  if (generation_ != fork_generation) {
    raise(HP_INVALID_ARGUMENT, "this thread belongs to the parent process");
  }
  return worker_;
}

void Worker::post(const py::object& function) {
  const auto call = [](void* posted) { call_and_release(static_cast<PyObject*>(posted)); };
  check(hp_worker_post(get(), call, py::object(function).release().ptr()));
}

void add_worker(py::module_& module) {
  using namespace py::literals;
  py::class_<Worker>(module, "Worker", "A thread that calls functions, one after the other.")
      .def(py::init<>())
      .def("post", &Worker::post, "function"_a);
}

}  // namespace horoplug::python
