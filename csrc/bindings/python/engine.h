// One rank's engine as Python sees it.
#pragma once

#include <pybind11/pybind11.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "../common/prepared_operations.h"
#include "engine_config.h"
#include "horoplug/horoplug.h"
#include "log_queue.h"
#include "memory.h"
#include "submission_arguments.h"

namespace horoplug::python {

// What one tensor of a finished operation has produced.
struct Result {
  std::int64_t rows;
  std::vector<std::int64_t> row_counts;
  pybind11::object memory;
};

// The methods are those of horoplug._native.Engine, which _native.pyi documents.
class Engine {
 public:
  explicit Engine(const EngineConfig& config);
  ~Engine() { close(); }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  hp_handle submit(const SubmissionArguments& arguments);
  // Performs an operation, or waits for it for one slice: the caller then checks for signals and
  // continues with wait(). 0: it is done, and nothing is kept of it.
  hp_handle perform(const SubmissionArguments& arguments);
  hp_handle perform(const hp_submission& submission, bool keep);
  // Performs an operation for as long as a wait may last before the caller checks for signals.
  // HP_IN_PROGRESS: it has a handle, and is not done yet.
  hp_status perform(const hp_instance& instance, hp_handle& handle);
  std::pair<std::vector<hp_handle>, pybind11::object> submit_batch(pybind11::handle prepared,
                                                                   pybind11::handle addresses,
                                                                   std::uintptr_t stream);

  hp_handle add_process_set(const std::vector<std::int32_t>& ranks);
  hp_handle remove_process_set(int process_set);
  hp_handle join(int process_set);
  hp_handle create_buffer(std::uint64_t bytes);
  std::unique_ptr<Buffer> take_buffer(hp_handle handle);
  std::int64_t value(hp_handle handle);

  bool poll(hp_handle handle);
  bool wait(hp_handle handle, double timeout);
  void note_waits(const std::vector<hp_handle>& handles, const std::vector<std::int64_t>& threads);
  std::vector<std::pair<std::size_t, pybind11::object>> wait_batch(
      const std::vector<hp_handle>& handles);
  Result result(hp_handle handle, int index, std::uintptr_t stream);
  void release(hp_handle handle);
  void release_batch(const std::vector<hp_handle>& handles);

  void signal_when_done(hp_handle handle, int fd);
  void stream_wait(hp_handle handle, std::uintptr_t stream);
  void stream_wait_batch(const std::vector<hp_handle>& handles, std::uintptr_t stream);
  std::unique_ptr<DeviceMemory> device_allocate(int device, std::int64_t bytes,
                                                std::uintptr_t stream);

  std::uintptr_t address() const { return reinterpret_cast<std::uintptr_t>(get()); }
  void shutdown();
  void abort(const std::string& reason);
  void set_limits(double data_timeout, double operation_timeout);
  void attach(const Engine& group, const std::string& name, const std::vector<std::int32_t>& ranks);
  void add_connection(int rank, const std::vector<int>& fds, const pybind11::bytes& keys);
  void fail_connection(int rank, const std::string& reason);
  pybind11::dict stats();
  void timeline_start(const std::string& path, bool mark_cycles);
  void timeline_stop();

  // Raises Error in a forked child, to which the engine does not belong.
  hp_engine* get() const;
  int rank() const { return rank_; }
  int size() const { return size_; }
  // Different for each engine of the process, and never 0.
  std::uint64_t number() const { return number_; }

 private:
  void close();
  // One thread at a time reads a result or releases a handle: without the GIL, another thread might
  // release the operation whose result is being read. `function` returns a status and must not use
  // Python, whose garbage collection may call release().
  template <typename Function>
  hp_status exclusively(Function&& function) {
    const std::lock_guard lock(results_);
    return function();
  }

  static std::uint64_t next_number();

  const int rank_, size_;
  hp_engine* engine_ = nullptr;
  const std::uint64_t number_ = next_number();
  pybind11::object log_callable_;
  std::unique_ptr<LogQueue> log_;
  int generation_ = fork_generation;
  std::mutex results_;
  std::atomic<double> listed_at_ = 0;  // see poll()
  bindings::PreparedOperations prepared_;
};

// Adds Engine, Result and Prepared to the module.
void add_engine(pybind11::module_& module);

}  // namespace horoplug::python
