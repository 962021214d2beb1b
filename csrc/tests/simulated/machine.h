// The simulated GPUs of a process: their contexts, streams, events, modules and memory. The driver
// functions (functions.h) operate on it.
#pragma once

#include <unistd.h>

#include <array>
#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "tests/simulated/event.h"
#include "tests/simulated/memory.h"
#include "tests/simulated/simulated_gpu.h"
#include "tests/simulated/stream.h"

namespace horoplug::testing::simulated {

// Values of CUresult that driver.h does not define.
inline constexpr CUresult kInvalidValue = 1;
inline constexpr CUresult kNotInitialized = 3;
inline constexpr CUresult kInvalidDevice = 101;
inline constexpr CUresult kInvalidImage = 200;
inline constexpr CUresult kInvalidContext = 201;
inline constexpr CUresult kInvalidHandle = 400;
inline constexpr CUresult kNotFound = 500;
inline constexpr CUresult kNotPermitted = 800;

inline constexpr int kMaxDevices = 8;

// What a CUcontext points to: the primary context of a device.
struct Device {
  int ordinal = 0;
  std::atomic<int> retained{0};
  Stream* default_stream = nullptr;
};

// What a CUmodule points to.
struct Module {
  int device;
  std::string kernel;  // the only kernel in the module; empty: the module has all kernels
};

// What a CUfunction points to.
struct Kernel {
  const Module* module;
  std::string name;
};

class Machine {
 public:
  explicit Machine(SimulatedOptions options);
  ~Machine();
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  // The machine of this process.
  static Machine& get();
  // get() calls `make` if no machine exists; that machine lives until the process ends.
  static void set_factory(std::unique_ptr<Machine> (*make)());

  const SimulatedOptions options;
  cuda::DriverApi api;
  NamedMemory named_memory;
  Memory memory;
  StreamsState streams_state;
  std::array<Device, kMaxDevices> devices;
  std::atomic<std::size_t> host_waits{0};
  std::atomic<int> pushed{0};

  // cuInit. From then on, calls in children of fork() return CUDA_ERROR_NOT_INITIALIZED.
  void start() { process_.store(::getpid()); }
  bool is_started() const { return process_.load() != 0; }

  // Returns the error with which a call has to fail before it has any effect, or kSuccess.
  // `in_context`: the function requires a current context.
  CUresult check_call(std::string_view function, bool in_context);
  void set_failure(const std::string& function, CUresult result);
  void lose_device(CUresult result);
  bool is_lost() const { return device_error_.load(std::memory_order_relaxed) != cuda::kSuccess; }

  // Streams start no further work between pause() and resume().
  void pause();
  void resume();

  CUresult misuse(const std::string& what, CUresult result = kInvalidValue);
  void on_misuse(std::function<void(const std::string&)> handler);

  // The context stack of this thread; the current context is the last element.
  std::vector<Device*>& contexts();
  // The device of this thread's current context; nullptr without a context.
  Device* current();

  // Each returns the object of a handle, or nullptr for an invalid handle. stream() also accepts
  // the handles of the default streams.
  Stream* stream(CUstream handle);
  Event* event(CUevent handle);
  Module* module(CUmodule handle);
  Kernel* kernel(CUfunction handle);  // also nullptr if its module was unloaded

  Stream* make_stream(int device, unsigned flags);
  Event* make_event(int device, unsigned flags);
  Event* open_event(const std::string& name, int device);  // nullptr: no event has this name
  Module* make_module(int device, std::string kernel);
  Kernel* make_kernel(const Module& module, std::string name);
  // Invalidates a handle. Returns false if it was invalid.
  bool destroy(const void* handle);

  // Finds the allocation, in GPU memory or pinned host memory, that contains this address range.
  // Reports misuse and returns nullptr if there is none.
  Allocation* find_accessible(const char* call, CUdeviceptr address, std::size_t bytes);
  // The allocations that a kernel's arguments refer to: each word of `args` that is an address in
  // an allocation counts as a pointer.
  std::vector<Allocation*> referenced(const std::vector<std::byte>& args);

  // Enqueues work on a stream and counts it under `what`; `uses` stay in use until it is done.
  void enqueue(Stream& stream, const char* what, Stream::Work work, std::vector<Allocation*> uses);

  // Each blocks the calling thread, and reports misuse after SimulatedOptions::wait_timeout.
  CUresult wait_for_stream(const char* call, Stream& stream);
  CUresult wait_for_device(const char* call, int device);
  CUresult wait_for_record(const char* call, Event& event, std::uint32_t record);

  std::size_t alive();
  std::size_t count(const std::string& what);

 private:
  CUresult wait(const char* call, Counter& counter, std::uint32_t target);
  std::string streams_at_work();

  std::atomic<CUresult> device_error_{cuda::kSuccess};
  std::atomic<int> process_{0};  // the process that called cuInit; 0: none
  const std::uint64_t generation_;
  std::mutex mutex_;
  std::map<std::string, CUresult, std::less<>> failures_;
  std::function<void(const std::string&)> on_misuse_;
  // The objects keep their addresses until the machine ends. A handle is valid while it is in
  // `live_`.
  std::deque<Stream> streams_;
  std::deque<Event> events_;
  std::deque<EventState> event_states_;
  std::deque<Module> modules_;
  std::deque<Kernel> kernels_;
  std::set<const void*> live_;
  std::map<std::string, std::size_t> counts_;
  unsigned event_numbers_ = 0;
};

// Fills the table of driver functions; defined in driver.cc.
void fill(cuda::DriverApi& api);

}  // namespace horoplug::testing::simulated
