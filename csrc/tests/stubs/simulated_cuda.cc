// A libcuda.so.1 with simulated GPUs, for tests with several processes. Environment variables
// configure it; their names begin with SIMULATED_GPU_:
//   FOLDER       a folder through which processes share memory and events
//   COUNT        the number of devices; default 1
//   SAME         1: all devices have the same UUID
//   MEMORY       the bytes of each device; default 1 GiB
//   IPC_EVENTS   0: the devices do not support interprocess events
//   DELAY        the longest random delay of a stream, in microseconds; default 50
//   SEED         the seed of the delays
// Tests call further functions, whose names begin with simulated_gpu_.
#include "tests/simulated/checked_function.h"
#include "tests/simulated/gpu_interface.h"
#include "tests/simulated/settings.h"

namespace horoplug::testing::simulated {
namespace {

std::unique_ptr<Machine> make() {
  SimulatedOptions options;
  options.folder = setting("SIMULATED_GPU_FOLDER", "");
  options.devices = static_cast<int>(setting("SIMULATED_GPU_COUNT", 1));
  options.one_gpu = setting("SIMULATED_GPU_SAME", 0) != 0;
  options.memory = static_cast<std::size_t>(setting("SIMULATED_GPU_MEMORY", 1LL << 30));
  options.ipc_events = setting("SIMULATED_GPU_IPC_EVENTS", 1) != 0;
  options.longest_delay = std::chrono::microseconds(setting("SIMULATED_GPU_DELAY", 50));
  options.seed = static_cast<unsigned>(setting("SIMULATED_GPU_SEED", options.seed));
  return std::make_unique<Machine>(std::move(options));
}

[[maybe_unused]] const bool kReady = (Machine::set_factory(make), true);

}  // namespace
}  // namespace horoplug::testing::simulated

using horoplug::testing::simulated::CheckedFunction;
using horoplug::testing::simulated::Functions;
using horoplug::testing::simulated::machine;

// NOLINTBEGIN(readability-identifier-naming,bugprone-macro-parentheses): CUDA defines the names.
// Each symbol is an ifunc, whose resolver returns the checked function. Clang and GCC differ in the
// name of a static function with C linkage, so the resolver is given one.
#define SIMULATED_EXPORT __attribute__((visibility("default")))
#define SIMULATED_SYMBOL(name, symbol, parameters)                                        \
  extern "C" {                                                                            \
  static CUresult(*resolve_##symbol()) parameters __asm__("resolve_" #symbol);            \
  static CUresult(*resolve_##symbol()) parameters {                                       \
    return CheckedFunction<"cu" #name, &Functions::name>::call;                           \
  }                                                                                       \
  SIMULATED_EXPORT CUresult symbol parameters __attribute__((ifunc("resolve_" #symbol))); \
  }
HOROPLUG_CUDA_FUNCTIONS(SIMULATED_SYMBOL)

extern "C" {

SIMULATED_EXPORT const void* simulated_gpu_interface() {
  return &horoplug::testing::simulated::gpu_interface();
}
// These are the functions of SimulatedGpu.
SIMULATED_EXPORT void simulated_gpu_fail(const char* function, CUresult result) {
  machine().set_failure(function, result);
}
SIMULATED_EXPORT void simulated_gpu_lose_device(CUresult result) { machine().lose_device(result); }
SIMULATED_EXPORT void simulated_gpu_pause() { machine().pause(); }
SIMULATED_EXPORT void simulated_gpu_resume() { machine().resume(); }
SIMULATED_EXPORT unsigned long long simulated_gpu_host_waits() { return machine().host_waits; }
SIMULATED_EXPORT unsigned long long simulated_gpu_bytes_used(int device) {
  return machine().memory.used(device);
}
SIMULATED_EXPORT unsigned long long simulated_gpu_count(const char* what) {
  return machine().count(what);
}
// Sets the result of cuStreamIsCapturing.
SIMULATED_EXPORT CUresult simulated_gpu_capture(CUstream handle, CUstreamCaptureStatus status) {
  auto* const stream = machine().stream(handle);
  if (stream == nullptr) return 400;
  stream->capture_status.store(status);
  return 0;
}
// Enqueues a delay on a stream.
SIMULATED_EXPORT CUresult simulated_gpu_delay(CUstream handle, unsigned microseconds) {
  auto* const stream = machine().stream(handle);
  if (stream == nullptr) return 400;
  machine().enqueue(*stream, "delay",
                    [microseconds](auto&) {
                      std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
                    },
                    {});
  return 0;
}

}  // extern "C"
// NOLINTEND(readability-identifier-naming,bugprone-macro-parentheses)
