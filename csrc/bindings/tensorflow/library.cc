// The entry points of this library. tf.load_op_library() loads it, and a constructor registers the
// operations. TensorFlow returns the operations that were registered while it loaded a library,
// which is why they are in a library of their own.
#include <string>

#include "../common/engine_slot.h"
#include "derived_kernel.h"
#include "handles.h"
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

// Whether kernels are asynchronous ones, which return before the operation has ended.
// The operation HorovodDefers tells whether they work.
__attribute__((visibility("default"))) bool horoplug_tensorflow_asynchronous() {
  return horoplug::tensorflow::api().NewAsyncKernelBuilder != nullptr ||
         horoplug::tensorflow::can_derive_kernels();
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
  horoplug::bindings::engine_slot().set(
      {.engine = engine, .rank = rank, .local_rank = local_rank, .local_size = local_size});
}

}  // extern "C"
