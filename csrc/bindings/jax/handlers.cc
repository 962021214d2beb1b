// What leaves this library: the handlers, which Python hands to XLA, and what Python calls itself.
#include <exception>

#include "../common/job.h"
#include "call.h"
#include "run.h"
#include "take.h"
#include "tickets.h"

namespace horoplug::jax {
namespace {

// An error of XLA's; a null pointer if XLA takes none.
xla::Error* to_error(const xla::Api& api, const Failure& failure) {
  xla::ErrorCreateArgs args{sizeof args, nullptr, failure.what(), failure.code()};
  return api.error_create(&args);
}

bool takes_metadata(xla::CallFrame* frame) {
  for (xla::Extension* at = frame->extensions; at != nullptr; at = at->next) {
    if (at->type != xla::kExtensionMetadata) continue;
    xla::Metadata& metadata = *reinterpret_cast<xla::MetadataExtension*>(at)->metadata;
    // What is used here is in every version since the first that can be asked, or asked for, so
    // that this library's is the one that the process has.
    metadata.api_version.major = frame->api != nullptr ? frame->api->api_version.major : 0;
    metadata.api_version.minor = frame->api != nullptr ? frame->api->api_version.minor : 1;
    // Above all, not one that CUDA graphs may contain: a replay would not ask the other ranks.
    metadata.traits = 0;
    return true;
  }
  return false;
}

// Tells Python how a call with a ticket has ended. XLA sees no failure: it would hand that to all
// programs that follow.
void end_ticket(std::int32_t ticket, const Failure* failure) {
  try {
    tickets().end(ticket, failure);
  } catch (const Failure&) {
    // Nobody waits for it.
  }
}

// Runs `body` for a call; returns how it failed, in XLA's terms. Nothing is thrown into its code.
template <typename Body>
xla::Error* handle(xla::CallFrame* frame, Body&& body) {
  if (takes_metadata(frame) || frame->stage != xla::kExecute) return nullptr;
  std::int32_t ticket = 0;
  const auto fail = [&](const Failure& failure) -> xla::Error* {
    if (ticket == 0) return to_error(*frame->api, failure);
    end_ticket(ticket, &failure);
    return nullptr;
  };
  try {
    ticket = Attributes(frame->attributes).integer("ticket");
    body(*frame);
    if (ticket != 0) end_ticket(ticket, nullptr);
    return nullptr;
  } catch (const Failure& failure) {
    return fail(failure);
  } catch (const std::exception& error) {
    return fail({xla::kInternal, error.what()});
  }
}

}  // namespace
}  // namespace horoplug::jax

#define HOROPLUG_EXPORT __attribute__((visibility("default")))

using horoplug::jax::tickets;

extern "C" {

HOROPLUG_EXPORT horoplug::jax::xla::Error* horoplug_jax_run(horoplug::jax::xla::CallFrame* frame) {
  return horoplug::jax::handle(frame, [](const auto& call) { horoplug::jax::Run(call).perform(); });
}

HOROPLUG_EXPORT horoplug::jax::xla::Error* horoplug_jax_take(horoplug::jax::xla::CallFrame* frame) {
  return horoplug::jax::handle(frame, horoplug::jax::take_results);
}

// The engine to use from now on. With a null pointer: waits until the last one is no longer in use,
// after it has shut down.
HOROPLUG_EXPORT void horoplug_jax_use(hp_engine* engine) {
  horoplug::bindings::job().set({engine});
}

// ---- tickets: see tickets.h ----

HOROPLUG_EXPORT void horoplug_jax_open(std::int32_t ticket, const char* name,
                                       const std::int64_t* splits, std::int32_t split_count) {
  tickets().open(ticket, {name, {splits, splits + split_count}});
}

HOROPLUG_EXPORT std::int32_t horoplug_jax_await(std::int32_t ticket, std::int32_t handlers,
                                                double seconds) {
  return tickets().await(ticket, handlers, seconds) ? 1 : 0;
}

HOROPLUG_EXPORT std::int32_t horoplug_jax_failure(std::int32_t ticket, const char** reason) {
  return tickets().failure(ticket, reason);
}

// `counts` has room for `size` numbers.
HOROPLUG_EXPORT void horoplug_jax_row_counts(std::int32_t ticket, std::int32_t tensor,
                                             std::int64_t* counts, std::int32_t size) {
  const auto& found = tickets().row_counts(ticket, static_cast<std::size_t>(tensor));
  for (std::int32_t i = 0; i < size; ++i) counts[i] = found.at(static_cast<std::size_t>(i));
}

HOROPLUG_EXPORT std::int32_t horoplug_jax_close(std::int32_t ticket, std::int32_t handlers) {
  return tickets().close(ticket, handlers) ? 1 : 0;
}

}  // extern "C"
