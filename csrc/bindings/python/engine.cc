#include "engine.h"

#include <pybind11/stl.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <exception>
#include <limits>
#include <tuple>

#include "errors.h"
#include "prepared.h"
#include "process.h"
#include "program_threads.h"

namespace py = pybind11;

namespace horoplug::python {
namespace {

// Seconds after which a waiting thread checks for signals, so that Ctrl-C gets through.
constexpr double kWaitSlice = 0.1;
// Seconds after which a thread that polls lists the other threads.
constexpr double kPollSlice = 0.25;

// Of the steady clock.
double seconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

void call_log(PyObject* callable, std::int32_t level, const char* text) {
  const PyGILState_STATE state = PyGILState_Ensure();
  Py_INCREF(callable);
  PyObject* const result = PyObject_CallFunction(callable, "is", static_cast<int>(level), text);
  if (result == nullptr) PyErr_WriteUnraisable(callable);
  Py_XDECREF(result);
  Py_DECREF(callable);
  PyGILState_Release(state);
}

// A method for METH_FASTCALL | METH_KEYWORDS that calls `method` of the engine and returns the
// handle. No function on the way is noexcept: at interpreter exit a daemon thread is ended by
// unwinding.
template <hp_handle (Engine::*method)(const SubmissionArguments&), bool with_keep>
PyObject* call_with_submission(PyObject* self, PyObject* const* values, Py_ssize_t count,
                               PyObject* keywords) {
  try {
    const SubmissionArguments arguments(values, count, keywords, with_keep);
    auto& engine = py::handle(self).cast<Engine&>();
    return PyLong_FromUnsignedLongLong((engine.*method)(arguments));
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::builtin_exception& error) {
    error.set_error();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

PyCFunction as_function(_PyCFunctionFastWithKeywords function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

// The signatures are in the form from which CPython makes __text_signature__.
#define SUBMISSION_PARAMETERS                                                                \
  "$self, op, dtype, tensors, name=None, reduce_op=0, root=0, prescale=1.0, postscale=1.0, " \
  "splits=None, process_set=0, wire_dtype=0, tag=0, layout=None, device=-1, stream=0"
constexpr const char* kSubmitDoc = "submit(" SUBMISSION_PARAMETERS ")\n--\n\n";
constexpr const char* kPerformDoc = "perform(" SUBMISSION_PARAMETERS ", keep=True)\n--\n\n";
#undef SUBMISSION_PARAMETERS

std::unique_ptr<Prepared> make_prepared(int op, int dtype, const std::vector<std::int64_t>& shape,
                                        const std::string& name, int reduce_op, double prescale,
                                        double postscale, int process_set, int wire_dtype,
                                        int device) {
  const hp_tensor tensor{nullptr, nullptr, shape.data(), static_cast<std::int32_t>(shape.size()),
                         0};
  hp_submission submission = {};
  submission.struct_size = sizeof submission;
  submission.op = op;
  submission.dtype = dtype;
  submission.reduce_op = reduce_op;
  submission.device = device;
  submission.process_set = process_set;
  submission.prescale = prescale;
  submission.postscale = postscale;
  submission.name = name.c_str();
  submission.tensors = &tensor;
  submission.tensor_count = 1;
  submission.wire_dtype = wire_dtype;
  return std::make_unique<Prepared>(submission);
}

// The type object of Python keeps pointers into this table.
std::array fast_methods = {
    PyMethodDef{"submit", as_function(call_with_submission<&Engine::submit, false>),
                METH_FASTCALL | METH_KEYWORDS, kSubmitDoc},
    PyMethodDef{"perform", as_function(call_with_submission<&Engine::perform, true>),
                METH_FASTCALL | METH_KEYWORDS, kPerformDoc},
};

void add_fast_methods(py::handle type) {
  for (PyMethodDef& method : fast_methods) {
    auto* const of = reinterpret_cast<PyTypeObject*>(type.ptr());
    const auto descriptor = py::reinterpret_steal<py::object>(PyDescr_NewMethod(of, &method));
    if (!descriptor) throw py::error_already_set();
    type.attr(method.ml_name) = descriptor;
  }
}

}  // namespace

Engine::Engine(const EngineConfig& config)
    : rank_(config.rank), size_(config.size), log_callable_(config.log) {
  CoreConfig core(config);
  if (!log_callable_.is_none()) {
    log_ = std::make_unique<LogQueue>(
        [callable = log_callable_.ptr()](std::int32_t level, const char* text) {
          call_log(callable, level, text);
        });
    core.get()->log = [](void* user, std::int32_t level, const char* text) {
      static_cast<LogQueue*>(user)->write(level, text);
    };
    core.get()->log_user = log_.get();
  }
  const hp_status status = without_gil([&] { return hp_engine_create(core.get(), &engine_); });
  if (status != HP_OK) {
    const std::string message = hp_last_error();
    close();
    raise(status, message);
  }
}

std::uint64_t Engine::next_number() {
  static std::atomic<std::uint64_t> engines = 0;
  return ++engines;
}

hp_engine* Engine::get() const {
  if (generation_ != fork_generation) {
    raise(HP_INVALID_ARGUMENT, "this engine belongs to the parent process");
  }
  return engine_;
}

void Engine::close() {
  if (generation_ != fork_generation) {
    // The threads belong to the parent process, so its objects are not destroyed here.
    static_cast<void>(log_.release());
    return;
  }
  without_gil([&] {
    if (engine_ != nullptr) hp_engine_destroy(std::exchange(engine_, nullptr));
    log_.reset();
    return 0;
  });
}

hp_handle Engine::submit(const SubmissionArguments& arguments) {
  hp_handle handle = 0;
  check(prepared_.submit(get(), arguments.submission(), &handle));
  return handle;
}

hp_status Engine::perform(const hp_instance& instance, hp_handle& handle) {
  hp_engine* const engine = get();
  return without_gil([&] { return hp_start_and_wait(engine, &instance, kWaitSlice, &handle); });
}

hp_handle Engine::perform(const SubmissionArguments& arguments) {
  return perform(arguments.submission(), arguments.keep());
}

hp_handle Engine::perform(const hp_submission& submission, bool keep) {
  hp_handle handle = 0;
  hp_engine* const engine = get();
  const hp_status status =
      without_gil([&] { return prepared_.perform(engine, submission, kWaitSlice, keep, &handle); });
  if (status == HP_IN_PROGRESS || (status == HP_OK && keep)) return handle;
  if (status == HP_OK) {
    if (handle != 0) hp_release(engine, handle);
    return 0;
  }
  const std::string message = hp_last_error();
  if (handle != 0) hp_release(engine, handle);
  raise(status, message);
}

hp_handle Engine::add_process_set(const std::vector<std::int32_t>& ranks) {
  hp_handle handle = 0;
  check(hp_process_set_add(get(), ranks.data(), static_cast<std::int32_t>(ranks.size()), &handle));
  return handle;
}

hp_handle Engine::remove_process_set(int process_set) {
  hp_handle handle = 0;
  check(hp_process_set_remove(get(), process_set, &handle));
  return handle;
}

hp_handle Engine::join(int process_set) {
  hp_handle handle = 0;
  check(hp_join(get(), process_set, &handle));
  return handle;
}

hp_handle Engine::create_buffer(std::uint64_t bytes) {
  hp_handle handle = 0;
  check(hp_buffer_create(get(), bytes, &handle));
  return handle;
}

std::unique_ptr<Buffer> Engine::take_buffer(hp_handle handle) {
  hp_engine* const engine = get();
  hp_buffer* buffer = nullptr;
  check(exclusively([&] { return hp_buffer_take(engine, handle, &buffer); }));
  return std::make_unique<Buffer>(buffer);
}

std::int64_t Engine::value(hp_handle handle) {
  std::int64_t value = 0;
  check(hp_value(get(), handle, &value));
  return value;
}

// The handles of the operations that were accepted, and the error of the first refused one.
std::pair<std::vector<hp_handle>, py::object> Engine::submit_batch(py::handle prepared,
                                                                   py::handle addresses,
                                                                   std::uintptr_t stream) {
  const Items operations(prepared, "prepared must be a sequence");
  const Items memory(addresses, "addresses must be a sequence");
  if (operations.size() != memory.size()) {
    throw py::value_error("submit_batch takes an address for each operation");
  }
  const auto count = static_cast<std::size_t>(operations.size());
  std::vector<void*> tensors(count);
  std::vector<hp_instance> instances(count);
  std::vector<std::shared_ptr<hp_prepared>> kept(count);
  const std::int32_t pool_thread = is_pool_thread() ? 1 : 0;
  std::size_t usable = 0;
  py::object refused = py::none();
  for (; usable < count; ++usable) {
    const auto at = static_cast<Py_ssize_t>(usable);
    hp_instance& instance = instances[usable];
    tensors[usable] = to_pointer(memory[at]);
    instance.struct_size = sizeof instance;
    instance.inputs = instance.outputs = &tensors[usable];
    instance.stream = to_stream(stream);
    instance.pool_thread = pool_thread;
    const hp_status status = py::handle(operations[at]).cast<Prepared&>().on(*this, kept[usable]);
    instance.prepared = kept[usable].get();
    if (status == HP_OK) continue;
    refused = make_error(status, hp_last_error());
    break;
  }
  std::vector<hp_handle> handles(usable);
  std::int32_t accepted = 0;
  const hp_status status = hp_start(get(), instances.data(), static_cast<std::int32_t>(usable),
                                    handles.data(), &accepted);
  handles.resize(static_cast<std::size_t>(accepted));
  if (status != HP_OK) refused = make_error(status, hp_last_error());
  return {std::move(handles), std::move(refused)};
}

bool Engine::poll(hp_handle handle) {
  hp_engine* const engine = get();
  if (hp_poll(engine, handle) != HP_IN_PROGRESS) return true;
  // A thread that does nothing but poll waits, as in wait().
  const double now = seconds();
  double listed_at = listed_at_;
  if (now - listed_at >= kPollSlice && listed_at_.compare_exchange_strong(listed_at, now)) {
    expect_threads(engine);
  }
  return false;
}

// Whether the operation is done. A negative timeout is none.
bool Engine::wait(hp_handle handle, double timeout) {
  hp_engine* const engine = get();
  const double deadline =
      timeout < 0 ? std::numeric_limits<double>::infinity() : seconds() + timeout;
  for (;;) {
    const double slice = std::clamp(deadline - seconds(), 0.0, kWaitSlice);
    const hp_status status = without_gil([&] { return hp_wait(engine, handle, slice); });
    if (status != HP_IN_PROGRESS) {
      check(status);
      return true;
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (slice < kWaitSlice) return false;
    expect_threads(engine);
  }
}

void Engine::note_waits(const std::vector<hp_handle>& handles,
                        const std::vector<std::int64_t>& threads) {
  horoplug::note_waits(get(), handles, threads);
}

// The indices of the operations that failed, and their errors.
std::vector<std::pair<std::size_t, py::object>> Engine::wait_batch(
    const std::vector<hp_handle>& handles) {
  hp_engine* const engine = get();
  std::vector<std::tuple<std::size_t, hp_status, std::string>> failures;
  for (std::size_t next = 0; next < handles.size();) {
    without_gil([&] {
      for (; next < handles.size(); ++next) {
        const hp_status status = hp_wait(engine, handles[next], kWaitSlice);
        if (status == HP_IN_PROGRESS) break;
        if (status != HP_OK) failures.emplace_back(next, status, hp_last_error());
      }
      return 0;
    });
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (next < handles.size()) expect_threads(engine);
  }
  std::vector<std::pair<std::size_t, py::object>> errors;
  errors.reserve(failures.size());
  for (const auto& [index, status, message] : failures) {
    errors.emplace_back(index, make_error(status, message));
  }
  return errors;
}

void Engine::signal_when_done(hp_handle handle, int fd) {
  const auto signal = [](void* context) {
    ::eventfd_write(static_cast<int>(std::bit_cast<std::intptr_t>(context)), 1);
  };
  check(hp_on_done(get(), handle, signal, std::bit_cast<void*>(static_cast<std::intptr_t>(fd))));
}

void Engine::stream_wait(hp_handle handle, std::uintptr_t stream) {
  check(hp_stream_wait(get(), handle, to_stream(stream)));
}

void Engine::stream_wait_batch(const std::vector<hp_handle>& handles, std::uintptr_t stream) {
  for (const hp_handle handle : handles) stream_wait(handle, stream);
}

std::unique_ptr<DeviceMemory> Engine::device_allocate(int device, std::int64_t bytes,
                                                      std::uintptr_t stream) {
  hp_device_memory* memory = nullptr;
  check(hp_device_allocate(get(), device, static_cast<std::uint64_t>(bytes), to_stream(stream),
                           &memory));
  return std::make_unique<DeviceMemory>(memory, bytes, device, stream);
}

Result Engine::result(hp_handle handle, int index, std::uintptr_t stream) {
  hp_tensor_result found = {};
  found.struct_size = sizeof(found);
  std::vector<std::int64_t> row_counts;
  void* data = nullptr;
  hp_device_memory* memory = nullptr;
  hp_engine* const engine = get();
  check(exclusively([&] {
    const hp_status status = hp_result(engine, handle, index, &found);
    if (status != HP_OK) return status;
    if (found.row_counts != nullptr) {
      row_counts.assign(found.row_counts, found.row_counts + found.row_count_size);
    }
    if (found.owned == 0) return HP_OK;
    if (found.device < 0) return hp_take(engine, handle, index, &data);
    return hp_take_device(engine, handle, index, to_stream(stream), &memory);
  }));
  Result result{found.rows, std::move(row_counts), py::none()};
  if (data != nullptr) result.memory = py::cast(std::make_unique<Memory>(data, found.bytes));
  if (memory != nullptr) {
    result.memory =
        py::cast(std::make_unique<DeviceMemory>(memory, found.bytes, found.device, stream));
  }
  return result;
}

void Engine::release(hp_handle handle) {
  hp_engine* const engine = get();
  check(exclusively([&] { return hp_release(engine, handle); }));
}

void Engine::release_batch(const std::vector<hp_handle>& handles) {
  for (const hp_handle handle : handles) release(handle);
}

void Engine::shutdown() {
  hp_engine* const engine = get();
  LogQueue* const log = log_.get();
  check(without_gil([&] {
    const hp_status status = hp_engine_shutdown(engine);
    if (log != nullptr) log->close();
    return status;
  }));
}

void Engine::abort(const std::string& reason) {
  hp_engine* const engine = get();
  check(without_gil([&] { return hp_engine_abort(engine, reason.c_str()); }));
}

void Engine::set_limits(double data_timeout, double operation_timeout) {
  check(hp_engine_set_limits(get(), data_timeout, operation_timeout));
}

void Engine::attach(const Engine& group, const std::string& name,
                    const std::vector<std::int32_t>& ranks) {
  check(hp_engine_attach(get(), group.get(), name.c_str(), ranks.data(),
                         static_cast<std::int32_t>(ranks.size())));
}

void Engine::add_connection(int rank, const std::vector<int>& fds, const py::bytes& keys) {
  const auto bytes = keys.operator std::string_view();
  hp_engine* const engine = get();
  if (!bytes.empty() && bytes.size() != std::size_t{2 * HP_KEY_BYTES} * fds.size()) {
    throw py::value_error("keys of a wrong size for rank " + std::to_string(rank));
  }
  const auto* const data = reinterpret_cast<const std::uint8_t*>(bytes.data());
  check(hp_connection_add(engine, rank, fds.data(), static_cast<std::int32_t>(fds.size()),
                          bytes.empty() ? nullptr : data));
}

void Engine::fail_connection(int rank, const std::string& reason) {
  check(hp_connection_fail(get(), rank, reason.c_str()));
}

py::dict Engine::stats() {
  hp_stats stats = {};
  stats.struct_size = sizeof(stats);
  check(hp_get_stats(get(), &stats));
  py::dict result;
  result["batches"] = stats.batches;
  result["tensors"] = stats.tensors;
  result["bytes"] = stats.bytes;
  result["control_messages"] = stats.control_messages;
  result["control_bytes"] = stats.control_bytes;
  result["cached_names"] = stats.cached_names;
  result["wakeups"] = stats.wakeups;
  result["planned_batches"] = stats.planned_batches;
  result["broken_plans"] = stats.broken_plans;
  result["failed"] = stats.failed;
  result["active_microseconds"] = stats.active_microseconds;
  return result;
}

void Engine::timeline_start(const std::string& path, bool mark_cycles) {
  hp_engine* const engine = get();
  check(without_gil([&] { return hp_timeline_start(engine, path.c_str(), mark_cycles ? 1 : 0); }));
}

void Engine::timeline_stop() {
  hp_engine* const engine = get();
  check(without_gil([&] { return hp_timeline_stop(engine); }));
}

void add_engine(py::module_& module) {
  using namespace py::literals;
  py::class_<Result>(module, "Result", "What one tensor of a finished operation has produced.")
      .def_readonly("rows", &Result::rows)
      .def_readonly("row_counts", &Result::row_counts)
      .def_readonly("memory", &Result::memory);

  py::class_<Prepared>(module, "Prepared",
                       "An in-place operation on one tensor, but for the tensor's address.")
      .def(py::init(&make_prepared), "op"_a, "dtype"_a, "shape"_a, "name"_a, "reduce_op"_a = 0,
           "prescale"_a = 1.0, "postscale"_a = 1.0, "process_set"_a = 0, "wire_dtype"_a = 0,
           "device"_a = -1);

  py::class_<Engine> engine(module, "Engine",
                            "One rank's engine. Methods release the GIL while they block.");
  add_fast_methods(engine);
  engine.def(py::init<const EngineConfig&>(), "config"_a)
      .def("add_process_set", &Engine::add_process_set, "ranks"_a)
      .def("remove_process_set", &Engine::remove_process_set, "process_set"_a)
      .def("join", &Engine::join, "process_set"_a = 0)
      .def("create_buffer", &Engine::create_buffer, "nbytes"_a)
      .def("take_buffer", &Engine::take_buffer, "handle"_a)
      .def("value", &Engine::value, "handle"_a)
      .def("submit_batch", &Engine::submit_batch, "prepared"_a, "addresses"_a, "stream"_a = 0)
      .def("poll", &Engine::poll, "handle"_a)
      .def("wait", &Engine::wait, "handle"_a, "timeout"_a = -1.0)
      .def("note_waits", &Engine::note_waits, "handles"_a, "threads"_a)
      .def("signal_when_done", &Engine::signal_when_done, "handle"_a, "fd"_a)
      .def("wait_batch", &Engine::wait_batch, "handles"_a)
      .def("stream_wait", &Engine::stream_wait, "handle"_a, "stream"_a)
      .def("stream_wait_batch", &Engine::stream_wait_batch, "handles"_a, "stream"_a)
      .def("device_allocate", &Engine::device_allocate, "device"_a, "nbytes"_a, "stream"_a)
      .def("result", &Engine::result, "handle"_a, "index"_a = 0, "stream"_a = 0)
      .def("release", &Engine::release, "handle"_a)
      .def("release_batch", &Engine::release_batch, "handles"_a)
      .def("shutdown", &Engine::shutdown)
      .def_property_readonly("address", &Engine::address)
      .def("abort", &Engine::abort, "reason"_a)
      .def("set_limits", &Engine::set_limits, "data_timeout"_a, "operation_timeout"_a)
      .def("attach", &Engine::attach, "group"_a, "name"_a, "ranks"_a)
      .def("add_connection", &Engine::add_connection, "rank"_a, "fds"_a, "keys"_a)
      .def("fail_connection", &Engine::fail_connection, "rank"_a, "reason"_a)
      .def("stats", &Engine::stats)
      .def("timeline_start", &Engine::timeline_start, "path"_a, "mark_cycles"_a = false)
      .def("timeline_stop", &Engine::timeline_stop);
}

}  // namespace horoplug::python
