// The C ABI of results in the CPU's memory and of shared buffers.
#include <cstdlib>

#include "engine/abi/abi.h"

using namespace horoplug::abi;
using horoplug::Error;

namespace horoplug::abi {

Allocation& allocation_of(HandleTable& handles, hp_handle handle, int32_t index, bool on_device) {
  const auto operation = handles.done(handle);
  const bool exists = index >= 0 && static_cast<std::size_t>(index) < operation->outcomes.size();
  auto* const owned =
      exists ? &operation->outcomes[static_cast<std::size_t>(index)].owned : nullptr;
  if (owned == nullptr || !*owned || (owned->get_deleter().device != nullptr) != on_device) {
    throw Error(HP_INVALID_ARGUMENT, "there is no allocation to take");
  }
  return *owned;
}

}  // namespace horoplug::abi

extern "C" {

hp_status hp_value(hp_engine* engine, hp_handle handle, int64_t* value) {
  return guarded([&] {
    const auto operation = engine->engine.handles().done(handle);
    if (!operation->status.ok()) return report(operation->status);
    *value = operation->value;
    return HP_OK;
  });
}

hp_status hp_result(hp_engine* engine, hp_handle handle, int32_t index, hp_tensor_result* result) {
  return guarded([&] {
    const auto operation = engine->engine.handles().done(handle);
    if (!operation->status.ok()) return report(operation->status);
    const auto& outcome = operation->outcome(index);
    hp_tensor_result full{};
    full.data = outcome.data;
    full.bytes = outcome.bytes;
    full.rows = outcome.rows;
    full.row_counts = outcome.row_counts.empty() ? nullptr : outcome.row_counts.data();
    full.row_count_size = static_cast<int32_t>(outcome.row_counts.size());
    full.owned = outcome.owned ? 1 : 0;
    full.device = operation->gpu.device ? operation->gpu.device->ordinal() : -1;
    hand_over(full, result);
    return HP_OK;
  });
}

hp_status hp_take(hp_engine* engine, hp_handle handle, int32_t index, void** data) {
  return guarded(
      [&] { *data = allocation_of(engine->engine.handles(), handle, index, false).release(); });
}

void hp_free(void* data) { std::free(data); }

hp_status hp_buffer_create(hp_engine* engine, uint64_t bytes, hp_handle* handle) {
  return guarded([&] { *handle = engine->engine.use()->create_buffer(bytes); });
}

hp_status hp_buffer_take(hp_engine* engine, hp_handle handle, hp_buffer** buffer) {
  return guarded([&] {
    const auto running = engine->engine.use();  // its end releases the buffers
    const auto operation = engine->engine.handles().done(handle);
    if (!operation->status.ok()) return report(operation->status);
    if (operation->signature().op != horoplug::OpKind::kAddBuffer || !operation->buffer) {
      throw Error(HP_INVALID_ARGUMENT, "the operation has no buffer to give");
    }
    *buffer = new hp_buffer{std::move(operation->buffer)};
    return HP_OK;
  });
}

void* hp_buffer_data(const hp_buffer* buffer) { return buffer->buffer->data(); }

uint64_t hp_buffer_size(const hp_buffer* buffer) { return buffer->buffer->bytes(); }

void hp_buffer_free(hp_buffer* buffer) { delete buffer; }

}  // extern "C"
