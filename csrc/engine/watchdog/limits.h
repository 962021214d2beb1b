// The time limits of an engine that follow from several options, each with what sets it.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>

#include "base/time.h"
#include "engine/options.h"

namespace horoplug {

// Limits are asked for in every round of the progress loop, so that they compose no text. They
// refer to the options.
struct Limit {
  Seconds time;
  std::string_view setter;  // "X sets"
  std::string_view limit = " the limit";

  // For messages: "X sets the limit".
  std::string set_by() const { return std::string(setter).append(limit); }
};

// How long an operation may be pending.
inline Limit operation_limit(const EngineOptions& options) {
  return {std::min(options.stall_shutdown_time.get(), options.operation_timeout.get()),
          options.operation_limit_set_by};
}

// How long a peer that this rank waits for may neither send nor answer. An operation may not take
// longer for that reason than for others.
inline Limit progress_limit(const EngineOptions& options) {
  Limit limit = operation_limit(options);
  const Seconds data = options.data_timeout.get();
  if (data < limit.time) limit = {data, "HOROVOD_GLOO_TIMEOUT_SECONDS sets", " this limit"};
  return limit;
}

}  // namespace horoplug
