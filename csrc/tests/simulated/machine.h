// The state of simulated GPUs, and what the functions of the driver do with it.
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

// Of CUresult, beyond those of driver.h.
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
  std::string kernel;  // empty: all of them
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

  // The one of this process.
  static Machine& get();
  // How it is made when there is none and it is needed. It then stays until the process ends.
  static void set_factory(std::unique_ptr<Machine> (*make)());

  const SimulatedOptions options;
  cuda::DriverApi api;
  NamedMemory named_memory;
  Memory memory;
  StreamsState streams_state;
  std::array<Device, kMaxDevices> devices;
  std::atomic<std::size_t> host_waits{0};
  std::atomic<int> pushed{0};

  // cuInit. Children of fork() have no CUDA then.
  void start() { process_.store(::getpid()); }
  bool is_started() const { return process_.load() != 0; }

  // What a call returns at once, before it does anything; kSuccess: nothing. `in_context`: it needs
  // one.
  CUresult check_call(std::string_view function, bool in_context);
  void set_failure(const std::string& function, CUresult result);
  void lose_device(CUresult result);
  bool is_lost() const { return device_error_.load(std::memory_order_relaxed) != cuda::kSuccess; }

  // Streams begin nothing more, and go on.
  void pause();
  void resume();

  CUresult misuse(const std::string& what, CUresult result = kInvalidValue);
  void on_misuse(std::function<void(const std::string&)> handler);

  // Contexts of this thread, the current one last.
  std::vector<Device*>& contexts();
  // nullptr: it has none.
  Device* current();

  // By handle; nullptr if there is none of it. A stream may be the default one.
  Stream* stream(CUstream handle);
  Event* event(CUevent handle);
  Module* module(CUmodule handle);
  Kernel* kernel(CUfunction handle);  // also nullptr if its module has been unloaded

  Stream* make_stream(int device, unsigned flags);
  Event* make_event(int device, unsigned flags);
  Event* open_event(const std::string& name, int device);  // nullptr: there is none
  Module* make_module(int device, std::string kernel);
  Kernel* make_kernel(const Module& module, std::string name);
  // Whether it was there.
  bool destroy(const void* handle);

  // The memory that holds all of these bytes; nullptr, and misuse, if there is none. On a GPU, or
  // pinned: both are within a GPU's reach.
  Allocation* find_accessible(const char* call, CUdeviceptr address, std::size_t bytes);
  // Of the words of a kernel's arguments, those which are addresses of memory that was handed out.
  std::vector<Allocation*> referenced(const std::vector<std::byte>& args);

  // Puts work into a stream.
  void enqueue(Stream& stream, const char* what, Stream::Work work, std::vector<Allocation*> uses);

  // The host waits.
  CUresult wait_for_stream(const char* call, Stream& stream);
  CUresult wait_for_device(const char* call, int device);
  CUresult wait_for_record(const char* call, Event& event, std::uint32_t record);

  std::size_t alive();
  std::size_t count(const std::string& what);

 private:
  CUresult wait(const char* call, Counter& counter, std::uint32_t target);
  std::string streams_at_work();

  std::atomic<CUresult> device_error_{cuda::kSuccess};
  std::atomic<int> process_{0};  // that has started it
  const std::uint64_t generation_;
  std::mutex mutex_;
  std::map<std::string, CUresult, std::less<>> failures_;
  std::function<void(const std::string&)> on_misuse_;
  // These stay in place until the end, and whether they still count is what the sets know.
  std::deque<Stream> streams_;
  std::deque<Event> events_;
  std::deque<EventState> event_states_;
  std::deque<Module> modules_;
  std::deque<Kernel> kernels_;
  std::set<const void*> live_;
  std::map<std::string, std::size_t> counts_;
  unsigned event_numbers_ = 0;
};

// Fills in the table of functions; driver.cc.
void fill(cuda::DriverApi& api);

}  // namespace horoplug::testing::simulated
