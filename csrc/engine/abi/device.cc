// The C ABI of GPU memory and streams.
#include <bit>

#include "engine/abi/abi.h"

using namespace horoplug::abi;
using horoplug::Error;

extern "C" {

hp_status hp_take_device(hp_engine* engine, hp_handle handle, int32_t index, void* stream,
                         hp_device_memory** memory) {
  return guarded([&] {
    auto taken = std::make_unique<hp_device_memory>(
        std::move(allocation_of(engine->engine.handles(), handle, index, true)));
    taken->memory.get_deleter().stream = static_cast<CUstream>(stream);
    *memory = taken.release();
  });
}

hp_status hp_device_allocate(hp_engine* engine, int32_t device, uint64_t bytes, void* stream,
                             hp_device_memory** memory) {
  return guarded([&] {
    if (device < 0) throw Error(HP_INVALID_ARGUMENT, "memory of the CPU is not allocated here");
    const auto owner = engine->engine.use()->device(device);
    const auto used_by = static_cast<CUstream>(stream);
    void* const data = std::bit_cast<void*>(owner->allocate(bytes, used_by));
    *memory = new hp_device_memory{horoplug::Allocation(data, {owner, used_by})};
  });
}

void* hp_device_memory_data(const hp_device_memory* memory) { return memory->memory.get(); }

void hp_device_memory_free(hp_device_memory* memory) { delete memory; }

hp_status hp_stream_wait(hp_engine* engine, hp_handle handle, void* stream) {
  return guarded([&] {
    const auto operation = engine->engine.handles().done(handle);
    horoplug::RankGpu::make_stream_wait(*operation, static_cast<CUstream>(stream));
  });
}

hp_status hp_stream_copy(hp_engine* engine, hp_handle handle, int32_t index, void* to,
                         void* stream) {
  return guarded([&] {
    const auto operation = engine->engine.handles().done(handle);
    horoplug::RankGpu::copy_result(*operation, index, to, static_cast<CUstream>(stream));
  });
}

}  // extern "C"
