// What TensorFlow and Python find of this library: tf.load_op_library() opens it, and with that
// come its operations. TensorFlow looks for what is new in its registry while it does so, which is
// why this is a library of its own.
#include <string>

#include "../common/job.h"
#include "handles.h"
#include "ops.h"
#include "xla.h"

namespace {

// Why the library is of no use; empty if it is.
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

// Why there are no operations; an empty string if there are.
__attribute__((visibility("default"))) const char* horoplug_tensorflow_problem() {
  return problem().c_str();
}

// Whether kernels in graphs return before they have ended; see HorovodDefers for what may prevent
// it.
__attribute__((visibility("default"))) bool horoplug_tensorflow_asynchronous() {
  return horoplug::tensorflow::api().NewAsyncKernelBuilder != nullptr;
}

// Prepares for functions that XLA compiles. What TensorFlow lacks for that; an empty string if it
// has all.
__attribute__((visibility("default"))) const char* horoplug_tensorflow_xla() {
  return horoplug::tensorflow::register_xla();
}

// The engine to use from now on (hp_engine*). With a null pointer: waits until the last one is no
// longer in use, after it has shut down.
__attribute__((visibility("default"))) void horoplug_tensorflow_use(hp_engine* engine,
                                                                    std::int32_t rank,
                                                                    std::int32_t local_rank,
                                                                    std::int32_t local_size) {
  horoplug::bindings::job().set({engine, rank, local_rank, local_size});
}

}  // extern "C"
