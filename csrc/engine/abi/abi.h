// What the files of the C ABI share: the objects behind its handles, and how structs and exceptions
// cross it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <type_traits>

#include "engine/abi/engine_owner.h"
#include "engine/engine.h"
#include "engine/operations/submission.h"
#include "horoplug/horoplug.h"
#include "transport/mpi/funnel.h"
#include "transport/stream_factory.h"

namespace horoplug::abi {

// What hp_config says, for an engine. Takes ownership of all descriptors, also if it throws Error.
// Sets up the factory.
EngineConfig make_config(const hp_config& given, StreamFactory& factory);

}  // namespace horoplug::abi

struct hp_engine {
  explicit hp_engine(const hp_config& given) : engine(horoplug::abi::make_config(given, streams)) {}
  horoplug::StreamFactory streams;
  horoplug::abi::EngineOwner engine;
};

struct hp_prepared {
  const hp_engine* engine;
  horoplug::Prepared operation;
};

struct hp_worker {
  std::shared_ptr<horoplug::Worker> thread = std::make_shared<horoplug::Worker>();
};

struct hp_buffer {
  std::shared_ptr<horoplug::SharedBuffer> buffer;
};

struct hp_device_memory {
  horoplug::Allocation memory;
};

namespace horoplug::abi {

// Keeps the text for hp_last_error().
hp_status report(hp_status code, const std::string& text);
inline hp_status report(const Status& status) { return report(status.code, status.message); }

// Runs `body`, which may return a status, and turns an exception into a status.
template <typename Body>
hp_status guarded(Body&& body) noexcept {
  try {
    if constexpr (std::is_void_v<std::invoke_result_t<Body>>) {
      body();
      return HP_OK;
    } else {
      return body();
    }
  } catch (const Error& error) {
    return report(error.status());
  } catch (const std::bad_alloc&) {
    return report(HP_INTERNAL, "out of memory");
  } catch (const std::exception& error) {
    return report(HP_INTERNAL, error.what());
  }
}

// A caller's struct, extended to the size that this library knows: fields that an older caller does
// not have are those of `full`.
template <typename Struct>
Struct complete(const Struct* given, Struct full = {}) {
  if (given == nullptr || given->struct_size < sizeof(std::uint64_t)) {
    throw Error(HP_INVALID_ARGUMENT, "a struct without struct_size");
  }
  std::memcpy(&full, given, std::min<std::size_t>(given->struct_size, sizeof full));
  full.struct_size = sizeof full;
  return full;
}

// Fills a caller's struct as far as the caller knows it.
template <typename Struct>
void hand_over(const Struct& full, Struct* out) {
  const std::uint64_t size = std::min<std::uint64_t>(out->struct_size, sizeof full);
  std::memcpy(out, &full, size);
  out->struct_size = size;
}

inline std::uint32_t checked_set(std::int32_t number) {
  if (number < 0) {
    throw Error(HP_INVALID_ARGUMENT, "process set " + std::to_string(number) + " does not exist");
  }
  return static_cast<std::uint32_t>(number);
}

// The memory of a result, for the caller to take; throws Error if there is none of that kind.
Allocation& allocation_of(HandleTable& handles, hp_handle handle, std::int32_t index,
                          bool on_device);

}  // namespace horoplug::abi
