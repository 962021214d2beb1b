#include "tests/simulated/gpu_interface.h"

#include <bit>
#include <memory>
#include <vector>

#include "tests/simulated/functions.h"

namespace horoplug::testing::simulated {
namespace {

Stream* find(CUstream handle, int device) {
  if (std::bit_cast<std::uintptr_t>(handle) > 2) return machine().stream(handle);
  return machine().devices[static_cast<std::size_t>(device)].default_stream;
}

int current_device() {
  const Device* const current = machine().current();
  return current != nullptr ? current->ordinal : 0;
}

CUresult uuid(CUuuid* uuid, int device) { return machine().api.DeviceGetUuid(uuid, device); }

int stream_device(CUstream handle, int device) {
  const Stream* const stream = find(handle, device);
  return stream != nullptr ? stream->device : -1;
}

CUresult enqueue(CUstream handle, int device, const char* what, void (*work)(void*), void* data,
                 void (*drop)(void*), const void* const* memory, const std::size_t* bytes,
                 std::size_t count) {
  const std::shared_ptr<void> owned(data, drop);
  Stream* const stream = find(handle, device);
  if (stream == nullptr) return unknown_handle("a stream");
  std::vector<Allocation*> uses;
  for (std::size_t i = 0; i < count; ++i) {
    if (bytes[i] == 0) continue;
    Allocation* const used =
        machine().find_accessible(what, std::bit_cast<std::uintptr_t>(memory[i]), bytes[i]);
    if (used == nullptr) return kInvalidValue;
    uses.push_back(used);
  }
  if (machine().is_lost()) return machine().check_call(what, false);
  machine().enqueue(
      *stream, what, [owned, work](Stream::Random&) { work(owned.get()); }, std::move(uses));
  return cuda::kSuccess;
}

CUresult wait(const char* call, int device) { return machine().wait_for_device(call, device); }

bool stopped() { return machine().streams_state.stopped.load(std::memory_order_relaxed); }

void misuse(const char* what) { machine().misuse(what); }

}  // namespace

const GpuInterface& gpu_interface() {
  static constexpr GpuInterface kInterface = {current_device, uuid,    stream_device, enqueue,
                                              wait,           stopped, misuse};
  return kInterface;
}

}  // namespace horoplug::testing::simulated
