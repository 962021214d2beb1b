// horoplug._native: the C ABI as Python sees it. The contract is horoplug/_native.pyi.
#include <pthread.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <memory_resource>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "dlpack.h"
#include "horoplug/horoplug.h"
#include "log_queue.h"
#include "prepared.h"

namespace py = pybind11;

namespace horoplug {
namespace {

// A waiting thread looks at signals this often, so that Ctrl-C gets through.
constexpr double kWaitSlice = 0.1;

PyObject* error_type = nullptr;

py::object make_error(hp_status status, const std::string& message) {
  return py::handle(error_type)(static_cast<int>(status), message);
}

[[noreturn]] void raise(hp_status status, const std::string& message) {
  PyErr_SetObject(error_type, make_error(status, message).ptr());
  throw py::error_already_set();
}

void check(hp_status status) {
  if (status != HP_OK) raise(status, hp_last_error());
}

// Calls a C function without the GIL. No destructor takes the GIL back: in a daemon thread at
// interpreter exit that ends the thread by unwinding, which may not start in a destructor.
template <typename Function>
auto without_gil(Function&& function) {
  PyThreadState* const state = PyEval_SaveThread();
  const auto result = function();
  PyEval_RestoreThread(state);
  return result;
}

// Counts the forks that lead to this process. An engine's threads do not follow into a child.
std::atomic<int> fork_generation{0};

class Memory {
 public:
  Memory(void* data, std::int64_t bytes) : data_(data), bytes_(bytes) {}
  ~Memory() { hp_free(data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::uintptr_t address() const { return reinterpret_cast<std::uintptr_t>(data_); }
  std::int64_t bytes() const { return bytes_; }
  py::buffer_info buffer() const {
    return {data_, 1, py::format_descriptor<std::uint8_t>::format(), 1, {bytes_}, {1}};
  }

 private:
  void* data_;
  std::int64_t bytes_;
};

void* to_stream(std::uintptr_t stream) { return reinterpret_cast<void*>(stream); }

// Memory on a card. It is given back in the order of a stream, which has to live as long.
class DeviceMemory {
 public:
  DeviceMemory(hp_device_memory* memory, std::int64_t bytes, int device, std::uintptr_t stream)
      : memory_(memory), bytes_(bytes), device_(device), stream_(stream) {}
  ~DeviceMemory() {
    // A forked child has no CUDA, and the memory is its parent's.
    if (generation_ == fork_generation) hp_device_memory_free(memory_);
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  std::uintptr_t address() const {
    return reinterpret_cast<std::uintptr_t>(hp_device_memory_data(memory_));
  }
  std::int64_t bytes() const { return bytes_; }
  int device() const { return device_; }
  std::uintptr_t stream() const { return stream_; }

  // Version 3, without a stream to wait for: the one that it is used on waits already.
  py::dict interface() const {
    py::dict fields;
    fields["shape"] = py::make_tuple(bytes_);
    fields["typestr"] = "|u1";
    fields["data"] = py::make_tuple(address(), false);
    fields["strides"] = py::none();
    fields["stream"] = py::none();
    fields["version"] = 3;
    return fields;
  }

 private:
  hp_device_memory* memory_;
  std::int64_t bytes_;
  int device_;
  std::uintptr_t stream_;
  int generation_ = fork_generation;
};

// Does not depend on the engine that has made it: arrays over it may live on.
class Buffer {
 public:
  explicit Buffer(hp_buffer* buffer) : buffer_(buffer) {}
  ~Buffer() { hp_buffer_free(buffer_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  std::uintptr_t address() const {
    return reinterpret_cast<std::uintptr_t>(hp_buffer_data(buffer_));
  }
  std::int64_t bytes() const { return static_cast<std::int64_t>(hp_buffer_size(buffer_)); }
  py::buffer_info buffer() const {
    return {hp_buffer_data(buffer_),
            1,
            py::format_descriptor<std::uint8_t>::format(),
            1,
            {bytes()},
            {1}};
  }

 private:
  hp_buffer* const buffer_;
};

struct Result {
  std::int64_t rows;
  std::vector<std::int64_t> row_counts;
  py::object memory;
};

// One sequence of Python objects as a C array of borrowed references.
class Items {
 public:
  Items(py::handle sequence, const char* what)
      : fast_(py::reinterpret_steal<py::object>(PySequence_Fast(sequence.ptr(), what))) {
    if (!fast_) throw py::error_already_set();
  }
  Py_ssize_t size() const { return PySequence_Fast_GET_SIZE(fast_.ptr()); }
  PyObject* operator[](Py_ssize_t i) const { return PySequence_Fast_GET_ITEM(fast_.ptr(), i); }

 private:
  py::object fast_;
};

std::int64_t to_int64(PyObject* number) {
  const long long value = PyLong_AsLongLong(number);
  if (value == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return value;
}

void* to_pointer(PyObject* number) {
  void* const value = PyLong_AsVoidPtr(number);
  if (value == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return value;
}

// The arrays behind an hp_submission; small ones stay on the stack.
// NOLINTNEXTLINE(*-member-init): clearing the bytes would cost more than their use
class Arena {
 public:
  template <typename T>
  T* allocate(Py_ssize_t count) {
    return static_cast<T*>(
        memory_.allocate(static_cast<std::size_t>(count) * sizeof(T), alignof(T)));
  }

  std::pair<const std::int64_t*, std::int32_t> integers(py::handle sequence, const char* what) {
    const Items items(sequence, what);
    auto* const values = allocate<std::int64_t>(items.size());
    for (Py_ssize_t i = 0; i < items.size(); ++i) values[i] = to_int64(items[i]);
    return {values, static_cast<std::int32_t>(items.size())};
  }

 private:
  std::array<std::byte, 1024> stack_;
  std::pmr::monotonic_buffer_resource memory_{stack_.data(), stack_.size()};
};

// A thread that calls Python functions.
class Worker {
 public:
  Worker() { check(hp_worker_start(&worker_)); }
  ~Worker() {
    if (generation_ != fork_generation) return;  // the thread is the parent's
    without_gil([this] {
      hp_worker_free(worker_);
      return 0;
    });
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  hp_worker* get() const {
    if (generation_ != fork_generation) {
      raise(HP_INVALID_ARGUMENT, "this thread belongs to the parent process");
    }
    return worker_;
  }

  void post(const py::object& function) {
    check(hp_worker_post(get(), call, py::object(function).release().ptr()));
  }

 private:
  static void call(void* function) {
    auto* const callable = static_cast<PyObject*>(function);
    const PyGILState_STATE state = PyGILState_Ensure();
    PyObject* const result = PyObject_CallNoArgs(callable);
    if (result == nullptr) PyErr_WriteUnraisable(callable);
    Py_XDECREF(result);
    Py_DECREF(callable);
    PyGILState_Release(state);
  }

  hp_worker* worker_ = nullptr;
  const int generation_ = fork_generation;
};

// rank, host, stream_fd, segment_fd, doorbell_fd
using Peer = std::tuple<int, int, int, int, int>;

// mode, what is fixed, steps to warm up, steps that count, most choices, log: as in hp_config
using Autotune =
    std::tuple<std::int32_t, std::uint32_t, std::int32_t, std::int32_t, std::int32_t, std::string>;

// The fields of an hp_mpi by their names.
hp_mpi to_mpi(const py::dict& fields) {
  hp_mpi mpi = {};
  mpi.struct_size = sizeof(mpi);
  mpi.handle_bytes = fields["handle_bytes"].cast<std::int32_t>();
  mpi.on_gpu = fields["on_gpu"].cast<std::int32_t>();
  mpi.communicator = fields["communicator"].cast<std::uint64_t>();
  mpi.byte = fields["byte"].cast<std::uint64_t>();
  const auto copy = [&](const char* name, auto& values) {
    const auto given = fields[name].cast<std::vector<std::uint64_t>>();
    if (given.size() != std::size(values)) throw py::value_error(std::string(name) + " of MPI");
    std::copy(given.begin(), given.end(), std::begin(values));
  };
  copy("dtypes", mpi.dtypes);
  copy("ops", mpi.ops);
  const auto address = [&](const char* name) {
    return reinterpret_cast<void*>(fields[name].cast<std::uintptr_t>());
  };
  mpi.in_place = address("in_place");
  mpi.isend = address("isend");
  mpi.irecv = address("irecv");
  mpi.test = address("test");
  mpi.cancel = address("cancel");
  mpi.finalized = address("finalized");
  mpi.error_string = address("error_string");
  mpi.iallreduce = address("iallreduce");
  mpi.ibcast = address("ibcast");
  mpi.iallgatherv = address("iallgatherv");
  mpi.ialltoallv = address("ialltoallv");
  mpi.ireduce_scatter = address("ireduce_scatter");
  mpi.ibarrier = address("ibarrier");
  // By hp_op.
  const auto costs = fields["costs"].cast<std::vector<std::pair<double, double>>>();
  if (costs.size() > HP_OP_COUNT) throw py::value_error("costs of MPI");
  for (std::size_t i = 0; i < costs.size(); ++i) {
    std::tie(mpi.latencies[i], mpi.byte_times[i]) = costs[i];
  }
  const py::object worker = fields["worker"];
  mpi.worker = worker.is_none() ? nullptr : worker.cast<const Worker&>().get();
  return mpi;
}

std::vector<const char*> to_texts(const std::vector<std::string>& strings) {
  std::vector<const char*> texts;
  texts.reserve(strings.size());
  for (const std::string& text : strings) texts.push_back(text.c_str());
  return texts;
}

class Engine {
 public:
  Engine(int rank, int size, int host, const std::vector<Peer>& peers, int segment_fd,
         int doorbell_fd, std::int64_t fusion_threshold, std::int64_t cache_capacity,
         double stall_check_time, double stall_shutdown_time, double data_timeout,
         double operation_timeout, double deadlock_time,
         const std::optional<std::string>& algorithm, int log_level, py::object log,
         int progress_cpu, bool separate_groups, const std::string& process_sets, int plan_after,
         std::int64_t bucket_bytes, const std::map<int, std::vector<std::int32_t>>& lanes,
         double link_latency, double link_bandwidth, const Autotune& autotune,
         const std::optional<py::dict>& mpi, const std::vector<std::string>& gpu_files,
         int local_rank, const std::optional<std::string>& gpu_algorithm)
      : log_callable_(std::move(log)), generation_(fork_generation) {
    std::vector<hp_peer> table;
    table.reserve(peers.size());
    for (const auto& [peer_rank, peer_host, stream, segment, doorbell] : peers) {
      table.push_back(
          {sizeof(hp_peer), peer_rank, peer_host, stream, segment, doorbell, 0, nullptr});
      const auto further = lanes.find(peer_rank);
      if (further == lanes.end()) continue;
      table.back().lane_count = static_cast<std::int32_t>(further->second.size());
      table.back().lane_fds = further->second.data();
    }
    hp_config config = {};
    config.struct_size = sizeof(config);
    config.rank = rank;
    config.size = size;
    config.host = host;
    config.segment_fd = segment_fd;
    config.doorbell_fd = doorbell_fd;
    config.peer_count = static_cast<std::int32_t>(table.size());
    config.peers = table.data();
    config.fusion_threshold = fusion_threshold;
    config.cache_capacity = cache_capacity;
    config.stall_check_time = stall_check_time;
    config.stall_shutdown_time = stall_shutdown_time;
    config.data_timeout = data_timeout;
    config.operation_timeout = operation_timeout;
    config.deadlock_time = deadlock_time;
    config.algorithm = algorithm ? algorithm->c_str() : nullptr;
    config.gpu_algorithm = gpu_algorithm ? gpu_algorithm->c_str() : nullptr;
    config.log_level = log_level;
    config.progress_cpu = progress_cpu + 1;
    config.separate_groups = separate_groups ? 1 : 0;
    config.process_sets = process_sets.c_str();
    config.plan_after = plan_after;
    config.bucket_bytes = bucket_bytes;
    config.link_latency = link_latency;
    config.link_bandwidth = link_bandwidth;
    const hp_mpi library = mpi ? to_mpi(*mpi) : hp_mpi{};
    if (mpi) config.mpi = &library;
    const std::vector<const char*> files = to_texts(gpu_files);
    config.gpu_files = files.data();
    config.gpu_file_count = static_cast<std::int32_t>(files.size());
    config.local_rank = local_rank;
    const auto& [mode, fixed, warmup, steps, samples, tuning_log] = autotune;
    config.autotune = mode;
    config.autotune_fixed = fixed;
    config.autotune_warmup = warmup;
    config.autotune_steps = steps;
    config.autotune_samples = samples;
    config.autotune_log = tuning_log.empty() ? nullptr : tuning_log.c_str();
    if (!log_callable_.is_none()) {
      log_ = std::make_unique<LogQueue>(
          [callable = log_callable_.ptr()](std::int32_t level, const char* text) {
            call(callable, level, text);
          });
      config.log = [](void* user, std::int32_t level, const char* text) {
        static_cast<LogQueue*>(user)->write(level, text);
      };
      config.log_user = log_.get();
    }
    const hp_status status = without_gil([&] { return hp_engine_create(&config, &engine_); });
    if (status != HP_OK) {
      const std::string message = hp_last_error();
      close();
      raise(status, message);
    }
  }

  ~Engine() { close(); }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  hp_handle submit(int op, int dtype, py::handle tensors, py::handle name, int reduce_op, int root,
                   double prescale, double postscale, py::handle splits, int process_set,
                   int wire_dtype, int device, std::uintptr_t stream) {
    Arena arena;
    const hp_submission submission =
        describe(arena, op, dtype, tensors, name, reduce_op, root, prescale, postscale, splits,
                 process_set, wire_dtype, device, stream);
    hp_handle handle = 0;
    check(hp_submit(get(), &submission, &handle));
    return handle;
  }

  // Waits for one slice: the caller looks at signals and goes on to wait().
  hp_handle perform(int op, int dtype, py::handle tensors, py::handle name, int reduce_op, int root,
                    double prescale, double postscale, py::handle splits, int process_set,
                    int wire_dtype, int device, bool keep, std::uintptr_t stream) {
    Arena arena;
    const hp_submission submission =
        describe(arena, op, dtype, tensors, name, reduce_op, root, prescale, postscale, splits,
                 process_set, wire_dtype, device, stream);
    hp_engine* const engine = get();
    hp_handle handle = 0;
    const hp_status status =
        without_gil([&] { return hp_perform(engine, &submission, kWaitSlice, &handle); });
    if (status == HP_IN_PROGRESS || (status == HP_OK && keep)) return handle;
    if (status == HP_OK) {
      hp_release(engine, handle);
      return 0;
    }
    const std::string message = hp_last_error();
    if (handle != 0) hp_release(engine, handle);
    raise(status, message);
  }

 private:
  static hp_submission describe(Arena& arena, int op, int dtype, py::handle tensors,
                                py::handle name, int reduce_op, int root, double prescale,
                                double postscale, py::handle splits, int process_set,
                                int wire_dtype, int device, std::uintptr_t stream) {
    const Items items(tensors, "tensors must be a sequence");
    auto* const table = arena.allocate<hp_tensor>(items.size());
    for (Py_ssize_t i = 0; i < items.size(); ++i) {
      const Items fields(items[i], "a tensor must be (input, output, shape)");
      if (fields.size() != 3) throw py::value_error("a tensor must be (input, output, shape)");
      const auto [shape, ndim] = arena.integers(fields[2], "a shape must be a sequence");
      table[i] = {to_pointer(fields[0]), to_pointer(fields[1]), shape, ndim, 0};
    }
    hp_submission submission = {};
    submission.struct_size = sizeof(submission);
    submission.op = op;
    submission.dtype = dtype;
    submission.reduce_op = reduce_op;
    submission.root = root;
    submission.device = device;
    submission.stream = to_stream(stream);
    submission.process_set = process_set;
    submission.wire_dtype = wire_dtype;
    submission.prescale = prescale;
    submission.postscale = postscale;
    submission.tensors = table;
    submission.tensor_count = static_cast<std::int32_t>(items.size());
    if (!name.is_none()) {
      submission.name = PyUnicode_AsUTF8(name.ptr());
      if (submission.name == nullptr) throw py::error_already_set();
    }
    if (!splits.is_none()) {
      std::tie(submission.splits, submission.split_count) =
          arena.integers(splits, "splits must be a sequence");
    }
    return submission;
  }

 public:
  std::uintptr_t address() const { return reinterpret_cast<std::uintptr_t>(get()); }

  hp_handle add_process_set(const std::vector<std::int32_t>& ranks) {
    hp_handle handle = 0;
    check(
        hp_process_set_add(get(), ranks.data(), static_cast<std::int32_t>(ranks.size()), &handle));
    return handle;
  }

  hp_handle remove_process_set(int process_set) {
    hp_handle handle = 0;
    check(hp_process_set_remove(get(), process_set, &handle));
    return handle;
  }

  hp_handle join(int process_set) {
    hp_handle handle = 0;
    check(hp_join(get(), process_set, &handle));
    return handle;
  }

  hp_handle create_buffer(std::uint64_t bytes) {
    hp_handle handle = 0;
    check(hp_buffer_create(get(), bytes, &handle));
    return handle;
  }

  std::unique_ptr<Buffer> take_buffer(hp_handle handle) {
    hp_buffer* buffer = nullptr;
    check(hp_buffer_take(get(), handle, &buffer));
    return std::make_unique<Buffer>(buffer);
  }

  std::int64_t value(hp_handle handle) {
    std::int64_t value = 0;
    check(hp_value(get(), handle, &value));
    return value;
  }

  // The handles of those that were accepted, and why the one after them was not.
  std::pair<std::vector<hp_handle>, py::object> submit_many(py::handle prepared,
                                                            py::handle addresses,
                                                            std::uintptr_t stream) {
    const Items operations(prepared, "prepared must be a sequence");
    const Items memory(addresses, "addresses must be a sequence");
    if (operations.size() != memory.size()) {
      throw py::value_error("submit_many takes an address for each operation");
    }
    const auto count = static_cast<std::size_t>(operations.size());
    std::vector<hp_tensor> tensors(count);
    std::vector<hp_submission> submissions(count);
    for (std::size_t i = 0; i < count; ++i) {
      const auto at = static_cast<Py_ssize_t>(i);
      const auto& operation = py::handle(operations[at]).cast<const Prepared&>();
      submissions[i] = operation.on(to_pointer(memory[at]), to_stream(stream), &tensors[i]);
    }
    std::vector<hp_handle> handles(count);
    std::int32_t accepted = 0;
    const hp_status status = hp_submit_many(
        get(), submissions.data(), static_cast<std::int32_t>(count), handles.data(), &accepted);
    handles.resize(static_cast<std::size_t>(accepted));
    if (status != HP_OK) return {std::move(handles), make_error(status, hp_last_error())};
    return {std::move(handles), py::none()};
  }

  bool poll(hp_handle handle) { return hp_poll(get(), handle) != HP_IN_PROGRESS; }

  void wait(hp_handle handle) {
    hp_engine* const engine = get();
    for (;;) {
      const hp_status status = without_gil([&] { return hp_wait(engine, handle, kWaitSlice); });
      if (status != HP_IN_PROGRESS) return check(status);
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
  }

  // The places of those that have failed, and how.
  std::vector<std::pair<std::size_t, py::object>> wait_many(const std::vector<hp_handle>& handles) {
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
    }
    std::vector<std::pair<std::size_t, py::object>> errors;
    errors.reserve(failures.size());
    for (const auto& [place, status, message] : failures) {
      errors.emplace_back(place, make_error(status, message));
    }
    return errors;
  }

  void stream_wait(hp_handle handle, std::uintptr_t stream) {
    check(hp_stream_wait(get(), handle, to_stream(stream)));
  }

  void stream_wait_many(const std::vector<hp_handle>& handles, std::uintptr_t stream) {
    for (const hp_handle handle : handles) stream_wait(handle, stream);
  }

  std::unique_ptr<DeviceMemory> device_allocate(int device, std::int64_t bytes,
                                                std::uintptr_t stream) {
    hp_device_memory* memory = nullptr;
    check(hp_device_allocate(get(), device, static_cast<std::uint64_t>(bytes), to_stream(stream),
                             &memory));
    return std::make_unique<DeviceMemory>(memory, bytes, device, stream);
  }

  Result result(hp_handle handle, int index, std::uintptr_t stream) {
    hp_tensor_result found = {};
    found.struct_size = sizeof(found);
    check(hp_result(get(), handle, index, &found));
    Result result{found.rows, {}, py::none()};
    if (found.row_counts != nullptr) {
      result.row_counts.assign(found.row_counts, found.row_counts + found.row_count_size);
    }
    if (found.owned != 0 && found.device < 0) {
      void* data = nullptr;
      check(hp_take(get(), handle, index, &data));
      result.memory = py::cast(std::make_unique<Memory>(data, found.bytes));
    } else if (found.owned != 0) {
      hp_device_memory* memory = nullptr;
      check(hp_take_device(get(), handle, index, to_stream(stream), &memory));
      result.memory =
          py::cast(std::make_unique<DeviceMemory>(memory, found.bytes, found.device, stream));
    }
    return result;
  }

  void release(hp_handle handle) { check(hp_release(get(), handle)); }

  void release_many(const std::vector<hp_handle>& handles) {
    for (const hp_handle handle : handles) release(handle);
  }

  void shutdown() {
    hp_engine* const engine = get();
    check(without_gil([&] { return hp_engine_shutdown(engine); }));
  }

  void abort(const std::string& reason) {
    hp_engine* const engine = get();
    check(without_gil([&] { return hp_engine_abort(engine, reason.c_str()); }));
  }

  py::dict stats() {
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
    return result;
  }

  void timeline_start(const std::string& path, bool mark_cycles) {
    hp_engine* const engine = get();
    check(
        without_gil([&] { return hp_timeline_start(engine, path.c_str(), mark_cycles ? 1 : 0); }));
  }

  void timeline_stop() {
    hp_engine* const engine = get();
    check(without_gil([&] { return hp_timeline_stop(engine); }));
  }

 private:
  hp_engine* get() const {
    if (generation_ != fork_generation)
      raise(HP_INVALID_ARGUMENT, "this engine belongs to the parent process");
    return engine_;
  }

  void close() {
    if (generation_ != fork_generation) {
      // The threads to end are the parent's; its objects are left alone.
      static_cast<void>(log_.release());
      return;
    }
    without_gil([&] {
      if (engine_ != nullptr) hp_engine_destroy(std::exchange(engine_, nullptr));
      log_.reset();
      return 0;
    });
  }

  static void call(PyObject* callable, std::int32_t level, const char* text) {
    const PyGILState_STATE state = PyGILState_Ensure();
    Py_INCREF(callable);
    PyObject* const result = PyObject_CallFunction(callable, "is", static_cast<int>(level), text);
    if (result == nullptr) PyErr_WriteUnraisable(callable);
    Py_XDECREF(result);
    Py_DECREF(callable);
    PyGILState_Release(state);
  }

  hp_engine* engine_ = nullptr;
  py::object log_callable_;
  std::unique_ptr<LogQueue> log_;
  int generation_;
};

// Where the memory of an object with the buffer protocol begins; None if it does not export it.
py::object address_of(py::handle object) {
  Py_buffer buffer;
  if (PyObject_GetBuffer(object.ptr(), &buffer, PyBUF_SIMPLE) != 0) {
    PyErr_Clear();
    return py::none();
  }
  py::object address = py::reinterpret_steal<py::object>(PyLong_FromVoidPtr(buffer.buf));
  PyBuffer_Release(&buffer);
  return address;
}

// What ends a process whose exit takes too long; for good, since threads may look at it until then.
struct Guard {
  bool set = false;
  double seconds = 0;
  std::string text;

  [[noreturn]] void end() const {
    [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text.data(), text.size());
    ::_exit(1);
  }
};
Guard& guard = *new Guard;

void guard_exit(double seconds, const std::string& text) {
  if (guard.set) return;
  guard = {true, seconds, text + "\n"};
  // Functions that are registered later run earlier.
  const int refused = Py_AtExit([] {
    if (guard.seconds <= 0) guard.end();
    std::thread([] {
      std::this_thread::sleep_for(std::chrono::duration<double>(guard.seconds));
      guard.end();
    }).detach();
  });
  if (refused != 0) throw std::runtime_error("too many functions are to be called at exit");
}

std::string gpu_facts(const std::vector<std::string>& files) {
  const std::vector<const char*> paths = to_texts(files);
  char* text = nullptr;
  check(without_gil(
      [&] { return hp_gpu_facts(paths.data(), static_cast<int32_t>(paths.size()), &text); }));
  const std::unique_ptr<char, decltype(&hp_free)> owner(text, hp_free);
  return text;
}

void define_error(py::module_& module) {
  py::dict attributes;
  const py::cpp_function status(
      [](const py::object& self) { return self.attr("args")[py::int_(0)]; });
  attributes["status"] = py::module_::import("builtins").attr("property")(status);
  attributes["__doc__"] =
      "A failed call. args is (status, message); status is one of the HP_* numbers of the C ABI.";
  error_type = PyErr_NewException("horoplug._native.Error", PyExc_Exception, attributes.ptr());
  if (error_type == nullptr) throw py::error_already_set();
  module.attr("Error") = py::handle(error_type);
}

}  // namespace
}  // namespace horoplug

PYBIND11_MODULE(_native, module) {
  using horoplug::Buffer;
  using horoplug::DeviceMemory;
  using horoplug::Engine;
  using horoplug::Memory;
  using horoplug::Prepared;
  using horoplug::Result;
  using horoplug::Worker;
  using namespace py::literals;

  if (hp_abi_version() != HP_ABI_VERSION) {
    throw py::import_error("libhoroplug.so has ABI version " + std::to_string(hp_abi_version()) +
                           ", expected " + std::to_string(HP_ABI_VERSION));
  }
  pthread_atfork(nullptr, nullptr, [] { ++horoplug::fork_generation; });
  py::module_::import("atexit").attr("register")(py::cpp_function([] {
    horoplug::without_gil([] {
      horoplug::LogQueue::close_all();
      return 0;
    });
  }));

  module.doc() = "The C core as Python sees it: a thin layer over the C ABI.";
  module.attr("ABI_VERSION") = HP_ABI_VERSION;
  horoplug::define_error(module);

  py::class_<Memory>(module, "Memory", py::buffer_protocol(),
                     "Memory the core allocated for a result; frees it when garbage collected.")
      .def_property_readonly("address", &Memory::address)
      .def_property_readonly("nbytes", &Memory::bytes)
      .def_buffer(&Memory::buffer);

  py::class_<DeviceMemory>(
      module, "DeviceMemory",
      "Memory on a card that the core allocated; given back, in the order of its stream, when "
      "garbage collected.")
      .def_property_readonly("address", &DeviceMemory::address)
      .def_property_readonly("nbytes", &DeviceMemory::bytes)
      .def_property_readonly("device", &DeviceMemory::device)
      .def_property_readonly("stream", &DeviceMemory::stream)
      .def_property_readonly("__cuda_array_interface__", &DeviceMemory::interface);

  py::class_<Buffer>(module, "Buffer", py::buffer_protocol(),
                     "This rank's part of a shared buffer; given back when garbage collected.")
      .def_property_readonly("address", &Buffer::address)
      .def_property_readonly("nbytes", &Buffer::bytes)
      .def_buffer(&Buffer::buffer);

  py::class_<Worker>(module, "Worker", "A thread that calls functions, one after the other.")
      .def(py::init<>())
      .def("post", &Worker::post, "function"_a);

  py::class_<Result>(module, "Result", "What one tensor of a finished operation has produced.")
      .def_readonly("rows", &Result::rows)
      .def_readonly("row_counts", &Result::row_counts)
      .def_readonly("memory", &Result::memory);

  py::class_<Prepared>(module, "Prepared",
                       "An in-place operation on one tensor, but for the tensor's address.")
      .def(py::init<int, int, std::vector<std::int64_t>, std::string, int, double, double, int, int,
                    int>(),
           "op"_a, "dtype"_a, "shape"_a, "name"_a, "reduce_op"_a = 0, "prescale"_a = 1.0,
           "postscale"_a = 1.0, "process_set"_a = 0, "wire_dtype"_a = 0, "device"_a = -1);

  py::class_<Engine>(module, "Engine",
                     "One rank's engine. Methods release the GIL while they block.")
      .def(py::init<int, int, int, const std::vector<horoplug::Peer>&, int, int, std::int64_t,
                    std::int64_t, double, double, double, double, double,
                    const std::optional<std::string>&, int, py::object, int, bool,
                    const std::string&, int, std::int64_t,
                    const std::map<int, std::vector<std::int32_t>>&, double, double,
                    const horoplug::Autotune&, const std::optional<py::dict>&,
                    const std::vector<std::string>&, int, const std::optional<std::string>&>(),
           py::kw_only(), "rank"_a, "size"_a, "host"_a, "peers"_a, "segment_fd"_a = -1,
           "doorbell_fd"_a = -1, "fusion_threshold"_a = 0, "cache_capacity"_a = 0,
           "stall_check_time"_a = 0.0, "stall_shutdown_time"_a = 0.0, "data_timeout"_a = 0.0,
           "operation_timeout"_a = 0.0, "deadlock_time"_a = 0.0, "algorithm"_a = py::none(),
           "log_level"_a = 0, "log"_a = py::none(), "progress_cpu"_a = -1,
           "separate_groups"_a = false, "process_sets"_a = "", "plan_after"_a = 0,
           "bucket_bytes"_a = 0, "lanes"_a = std::map<int, std::vector<std::int32_t>>{},
           "link_latency"_a = 0.0, "link_bandwidth"_a = 0.0,
           "autotune"_a = horoplug::Autotune{0, 0, 0, 0, 0, ""}, "mpi"_a = py::none(),
           "gpu_files"_a = std::vector<std::string>{}, "local_rank"_a = 0,
           "gpu_algorithm"_a = py::none())
      .def("submit", &Engine::submit, "op"_a, "dtype"_a, "tensors"_a, "name"_a = py::none(),
           "reduce_op"_a = 0, "root"_a = 0, "prescale"_a = 1.0, "postscale"_a = 1.0,
           "splits"_a = py::none(), "process_set"_a = 0, "wire_dtype"_a = 0, "device"_a = -1,
           "stream"_a = 0)
      .def("perform", &Engine::perform, "op"_a, "dtype"_a, "tensors"_a, "name"_a = py::none(),
           "reduce_op"_a = 0, "root"_a = 0, "prescale"_a = 1.0, "postscale"_a = 1.0,
           "splits"_a = py::none(), "process_set"_a = 0, "wire_dtype"_a = 0, "device"_a = -1,
           "keep"_a = true, "stream"_a = 0)
      .def("add_process_set", &Engine::add_process_set, "ranks"_a)
      .def("remove_process_set", &Engine::remove_process_set, "process_set"_a)
      .def("join", &Engine::join, "process_set"_a = 0)
      .def("create_buffer", &Engine::create_buffer, "nbytes"_a)
      .def("take_buffer", &Engine::take_buffer, "handle"_a)
      .def("value", &Engine::value, "handle"_a)
      .def("submit_many", &Engine::submit_many, "prepared"_a, "addresses"_a, "stream"_a = 0)
      .def("poll", &Engine::poll, "handle"_a)
      .def("wait", &Engine::wait, "handle"_a)
      .def("wait_many", &Engine::wait_many, "handles"_a)
      .def("stream_wait", &Engine::stream_wait, "handle"_a, "stream"_a)
      .def("stream_wait_many", &Engine::stream_wait_many, "handles"_a, "stream"_a)
      .def("device_allocate", &Engine::device_allocate, "device"_a, "nbytes"_a, "stream"_a)
      .def("result", &Engine::result, "handle"_a, "index"_a = 0, "stream"_a = 0)
      .def("release", &Engine::release, "handle"_a)
      .def("release_many", &Engine::release_many, "handles"_a)
      .def("shutdown", &Engine::shutdown)
      .def_property_readonly("address", &Engine::address)
      .def("abort", &Engine::abort, "reason"_a)
      .def("stats", &Engine::stats)
      .def("timeline_start", &Engine::timeline_start, "path"_a, "mark_cycles"_a = false)
      .def("timeline_stop", &Engine::timeline_stop);

  module.def("version", [] { return std::string(hp_version()); });
  module.def("cpu_kernels", [] { return std::string(hp_cpu_kernels()); });
  module.def("algorithms", [] { return std::string(hp_algorithms()); });
  module.def("gpu_facts", &horoplug::gpu_facts, "files"_a);
  module.def("address_of", &horoplug::address_of, "buffer"_a);
  module.def("dtype_size", &hp_dtype_size, "dtype"_a);
  horoplug::add_dlpack(module);
  module.def("guard_exit", &horoplug::guard_exit, "seconds"_a, "text"_a);
}
