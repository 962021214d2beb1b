// The exported functions of this library: the handlers, which Python registers with XLA, and the
// functions that Python calls itself.
#include <exception>

#include "../common/engine_slot.h"
#include "collective_call.h"
#include "copy_results.h"
#include "eager_calls.h"
#include "ffi_frame.h"

namespace horoplug::jax {
namespace {

// An XLA error. Null if XLA cannot create one.
xla::Error* to_error(const xla::Api& api, const Failure& failure) {
  xla::ErrorCreateArgs args{sizeof args, nullptr, failure.what(), failure.code()};
  return api.error_create(&args);
}

bool answer_metadata_request(xla::CallFrame* frame) {
  for (xla::Extension* at = frame->extensions; at != nullptr; at = at->next) {
    if (at->type != xla::kExtensionMetadata) continue;
    xla::Metadata& metadata = *reinterpret_cast<xla::MetadataExtension*>(at)->metadata;
    // The functions used here exist in every minor version that supports this extension, so that
    // the minor version of this library is that of the process.
    const bool is_known = frame->api != nullptr && frame->api->api_version.major == xla::kMajor;
    metadata.api_version.major = xla::kMajor;
    metadata.api_version.minor = is_known ? frame->api->api_version.minor : xla::kFirstMinor;
    // In particular, not compatible with CUDA graphs: a replay would not communicate.
    metadata.traits = 0;
    return true;
  }
  return false;
}

// Records the outcome of an eager call for Python. XLA gets no failure, which it would pass on to
// all later programs.
void end_eager_call(std::int32_t number, const Failure* failure) {
  try {
    eager_calls().end(number, failure);
  } catch (const std::exception&) {
    // Python has not opened the number, so nothing waits for the outcome; or there is no memory for
    // the reason, and Python reports that XLA has not run the operation.
  }
}

// Runs `body` for a call and returns its failure as an XLA error. No exception reaches XLA's code.
template <typename Body>
xla::Error* handle(xla::CallFrame* frame, Body&& body) {
  if (answer_metadata_request(frame) || frame->stage != xla::kExecute) return nullptr;
  std::int32_t eager_call = 0;
  const auto fail = [&](const Failure& failure) -> xla::Error* {
    if (eager_call == 0) return to_error(*frame->api, failure);
    end_eager_call(eager_call, &failure);
    return nullptr;
  };
  try {
    eager_call = Attributes(frame->attributes).integer("eager_call");
    body(*frame);
    if (eager_call != 0) end_eager_call(eager_call, nullptr);
    return nullptr;
  } catch (const Failure& failure) {
    return fail(failure);
  } catch (const std::exception& error) {
    return fail({xla::kInternal, error.what()});
  } catch (...) {
    return fail({xla::kInternal, "unknown exception in horoplug"});
  }
}

}  // namespace
}  // namespace horoplug::jax

#define HOROPLUG_EXPORT __attribute__((visibility("default")))

using horoplug::jax::eager_calls;

extern "C" {

HOROPLUG_EXPORT horoplug::jax::xla::Error* horoplug_jax_run(horoplug::jax::xla::CallFrame* frame) {
  return horoplug::jax::handle(
      frame, [](const auto& call) { horoplug::jax::CollectiveCall(call).perform(); });
}

HOROPLUG_EXPORT horoplug::jax::xla::Error* horoplug_jax_copy_results(
    horoplug::jax::xla::CallFrame* frame) {
  return horoplug::jax::handle(frame, horoplug::jax::copy_results);
}

// Sets the engine. A null pointer clears it and waits until no call uses it any more; the engine
// has been shut down before.
HOROPLUG_EXPORT void horoplug_jax_use(hp_engine* engine) {
  horoplug::bindings::engine_slot().set({.engine = engine});
}

// ---- eager calls: see eager_calls.h ----

HOROPLUG_EXPORT void horoplug_jax_open(std::int32_t number, const char* name,
                                       const std::int64_t* splits, std::int32_t split_count) {
  eager_calls().open(number, {.name = name, .splits = {splits, splits + split_count}});
}

HOROPLUG_EXPORT std::int32_t horoplug_jax_await(std::int32_t number, std::int32_t handlers,
                                                double seconds) {
  return eager_calls().await(number, handlers, seconds) ? 1 : 0;
}

HOROPLUG_EXPORT std::int32_t horoplug_jax_failure(std::int32_t number, const char** reason) {
  return eager_calls().failure(number, reason);
}

// `counts` has `size` elements.
HOROPLUG_EXPORT void horoplug_jax_row_counts(std::int32_t number, std::int32_t tensor,
                                             std::int64_t* counts, std::int32_t size) {
  const auto& found = eager_calls().row_counts(number, static_cast<std::size_t>(tensor));
  for (std::int32_t i = 0; i < size; ++i) counts[i] = found.at(static_cast<std::size_t>(i));
}

HOROPLUG_EXPORT std::int32_t horoplug_jax_close(std::int32_t number, std::int32_t handlers) {
  return eager_calls().close(number, handlers) ? 1 : 0;
}

}  // extern "C"
