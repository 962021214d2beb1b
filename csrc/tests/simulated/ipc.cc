// Driver functions: memory and events of other processes (CUDA IPC).
#include <bit>
#include <cstdio>
#include <sstream>
#include <string>

#include "tests/simulated/functions.h"

namespace horoplug::testing::simulated {

using namespace horoplug::cuda;

CUresult Functions::IpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr address) {
  const Allocation* const memory = machine().memory.find(address);
  if (memory == nullptr || memory->kind != MemoryKind::kDevice) return kInvalidValue;
  *handle = {};
  std::snprintf(handle->reserved, sizeof handle->reserved, "%s %zu", memory->name.c_str(),
                memory->bytes);
  return kSuccess;
}

CUresult Functions::IpcOpenMemHandle(CUdeviceptr* address, CUipcMemHandle handle, unsigned flags) {
  handle.reserved[63] = '\0';
  std::istringstream text(handle.reserved);
  std::string name;
  std::size_t bytes = 0;
  if (flags != kIpcLazyPeerAccess || !(text >> name >> bytes)) return kInvalidValue;
  const Allocation* const memory = machine().memory.open(name, bytes, machine().current()->ordinal);
  if (memory == nullptr) return kInvalidHandle;
  *address = std::bit_cast<std::uintptr_t>(memory->data);
  return kSuccess;
}

CUresult Functions::IpcCloseMemHandle(CUdeviceptr address) {
  const Allocation* const memory = machine().memory.find(address);
  if (memory != nullptr && memory->kind == MemoryKind::kImported &&
      memory->uses.load(std::memory_order_relaxed) > 0) {
    return in_use(*memory, "cuIpcCloseMemHandle");
  }
  return machine().memory.close(address) ? kSuccess
                                         : unknown_handle("memory for cuIpcCloseMemHandle");
}

CUresult Functions::IpcGetEventHandle(CUipcEventHandle* handle, CUevent event_handle) {
  const Event* const event = machine().event(event_handle);
  if (event == nullptr) return unknown_handle("an event");
  if (event->name.empty()) return kInvalidHandle;
  *handle = {};
  std::snprintf(handle->reserved, sizeof handle->reserved, "%s", event->name.c_str());
  return kSuccess;
}

CUresult Functions::IpcOpenEventHandle(CUevent* made, CUipcEventHandle handle) {
  handle.reserved[63] = '\0';
  Event* const event = machine().open_event(handle.reserved, machine().current()->ordinal);
  *made = reinterpret_cast<CUevent>(event);
  return event != nullptr ? kSuccess : kInvalidHandle;
}

}  // namespace horoplug::testing::simulated
