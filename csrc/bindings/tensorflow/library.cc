// The entry points of this library. tf.load_op_library() loads it, and a constructor registers the
// operations. TensorFlow returns the operations that were registered while it loaded a library,
// which is why they are in a library of their own.
#include <string>

#include "../common/engine_slot.h"
#include "ended_queues.h"
#include "handles.h"
#include "kernel.h"
#include "ops.h"
#include "xla.h"

namespace {

// Why the library cannot be used; empty if it can.
std::string& problem() {
  static auto* const text = new std::string;
  return *text;
}

[[gnu::constructor]] void load() {
  const std::string missing = horoplug::tensorflow::load_api();
  if (!missing.empty()) {
    problem() = missing + " is missing";
    return;
  }
  horoplug::tensorflow::guarded([] { horoplug::tensorflow::register_ops(); },
                                [](auto, const char* message) { problem() = message; });
}

}  // namespace

extern "C" {

// Why there are no operations. An empty string if there are.
__attribute__((visibility("default"))) const char* horoplug_tensorflow_problem() {
  return problem().c_str();
}

// Whether TensorFlow supports asynchronous kernels, which return before the operation has ended.
// The operation HorovodDefers tells whether they work.
__attribute__((visibility("default"))) bool horoplug_tensorflow_asynchronous() {
  return horoplug::tensorflow::api().NewAsyncKernelBuilder != nullptr;
}

// Sets the function that starts a thread which calls horoplug_tensorflow_ended for ever. It is
// called once, before the first operation is started that way.
__attribute__((visibility("default"))) void horoplug_tensorflow_watch(void (*start)()) {
  horoplug::tensorflow::ended_queues().on_expect(start);
}

// Waits until an operation has ended that HorovodStart has started. Writes the name of the
// queue that is to get an element, cut to `bytes`.
__attribute__((visibility("default"))) void horoplug_tensorflow_ended(char* name,
                                                                      std::size_t bytes) {
  const std::string queue = horoplug::tensorflow::ended_queues().take();
  name[queue.copy(name, bytes - 1)] = 0;
}

// Registers the custom call for functions that XLA compiles. Returns what TensorFlow lacks for
// that, or an empty string.
__attribute__((visibility("default"))) const char* horoplug_tensorflow_xla() {
  return horoplug::tensorflow::register_xla();
}

// Sets the engine. A null pointer clears it and waits until no operation uses it any more; the
// engine has been shut down before.
__attribute__((visibility("default"))) void horoplug_tensorflow_use(hp_engine* engine,
                                                                    std::int32_t rank,
                                                                    std::int32_t local_rank,
                                                                    std::int32_t local_size) {
  if (engine == nullptr) horoplug::tensorflow::forget_started();
  horoplug::bindings::engine_slot().set(
      {.engine = engine, .rank = rank, .local_rank = local_rank, .local_size = local_size});
}

}  // extern "C"
