#include "program_threads.h"

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <vector>

namespace py = pybind11;

namespace horoplug {
namespace {

py::object all_threads() { return py::module_::import("threading").attr("enumerate")(); }

bool find_in_threading() {
  const py::object caller = py::module_::import("threading").attr("get_ident")();
  for (const py::handle thread : all_threads()) {
    const py::object ident = thread.attr("ident");
    if (!ident.equal(caller)) continue;
    // threading has one of these for each thread of others that has asked for its own object.
    return thread.get_type().attr("__name__").cast<std::string>() != "_DummyThread";
  }
  return false;
}

// Whether a thread waits for the next call of its executor: its innermost function is then that of
// the module itself. It submits nothing unless another thread gives it something to do.
bool is_idle_executor_thread(const py::dict& frames, const py::handle& thread) {
  const py::object ident = thread.attr("ident");
  if (!frames.contains(ident)) return false;
  const py::object names = frames[ident].attr("f_globals");
  const py::object module = names.attr("get")("__name__");
  return module.equal(py::str("concurrent.futures.thread"));
}

}  // namespace

bool is_pool_thread() {
  thread_local const bool is_pool = !find_in_threading();
  return is_pool;
}

void expect_threads(hp_engine* engine) {
  std::vector<std::int64_t> ids;
  try {
    const py::dict frames = py::module_::import("sys").attr("_current_frames")();
    for (const py::handle thread : all_threads()) {
      const py::object id = thread.attr("native_id");
      if (id.is_none() || thread.attr("daemon").cast<bool>()) continue;
      if (!is_idle_executor_thread(frames, thread)) ids.push_back(id.cast<std::int64_t>());
    }
  } catch (const py::error_already_set&) {
    return;  // the interpreter ends
  }
  hp_expect_threads(engine, ids.data(), static_cast<std::int32_t>(ids.size()));
}

}  // namespace horoplug
