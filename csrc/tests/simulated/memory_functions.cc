// Driver functions: memory and copies.
#include <bit>
#include <cstdio>
#include <cstring>
#include <vector>

#include "tests/simulated/functions.h"

namespace horoplug::testing::simulated {

using namespace horoplug::cuda;

namespace {

void* host(CUdeviceptr address) {
  return std::bit_cast<void*>(static_cast<std::uintptr_t>(address));
}

template <typename T>
CUresult store(void* to, T value) {
  std::memcpy(to, &value, sizeof value);
  return kSuccess;
}

// Enqueues a copy between GPU or pinned memory.
CUresult copy(const char* what, CUdeviceptr to, CUdeviceptr from, std::size_t bytes,
              CUstream handle) {
  Stream* const stream = machine().stream(handle);
  if (stream == nullptr) return unknown_handle("a stream");
  if (bytes == 0) return kSuccess;
  Allocation* const target = machine().find_accessible(what, to, bytes);
  Allocation* const source = machine().find_accessible(what, from, bytes);
  if (target == nullptr || source == nullptr) return kInvalidValue;
  machine().enqueue(
      *stream, what,
      [to, from, bytes](Stream::Random&) { std::memmove(host(to), host(from), bytes); },
      {target, source});
  return kSuccess;
}

bool is_pinned(const void* data, std::size_t bytes) {
  const auto address = std::bit_cast<std::uintptr_t>(data);
  const Allocation* const found = machine().memory.find(address);
  return found != nullptr && found->kind == MemoryKind::kPinned && found->holds(address, bytes);
}

CUresult allocate(MemoryKind kind, int device, std::size_t bytes, CUdeviceptr* address) {
  if (bytes == 0) return kInvalidValue;
  const Allocation* const made = machine().memory.allocate(kind, device, bytes);
  if (made == nullptr) return kOutOfMemory;
  *address = std::bit_cast<std::uintptr_t>(made->data);
  return kSuccess;
}

}  // namespace

CUresult Functions::MemAlloc(CUdeviceptr* address, std::size_t bytes) {
  return allocate(MemoryKind::kDevice, machine().current()->ordinal, bytes, address);
}

CUresult Functions::MemFree(CUdeviceptr address) {
  Allocation* const memory =
      machine().memory.remove(address, MemoryKind::kDevice, MemoryKind::kPool);
  if (memory == nullptr) return unknown_handle("memory for cuMemFree");
  // As in CUDA, cuMemFree waits until the GPU is idle, except for memory of a pool.
  if (memory->kind == MemoryKind::kDevice) {
    ++machine().host_waits;
    const CUresult result = machine().wait_for_device("cuMemFree", memory->device);
    if (result != kSuccess) return result;
  }
  if (memory->uses.load(std::memory_order_relaxed) > 0) return in_use(*memory, "cuMemFree");
  machine().memory.release(*memory);
  return kSuccess;
}

CUresult Functions::MemAllocAsync(CUdeviceptr* address, std::size_t bytes, CUstream handle) {
  const Stream* const stream = machine().stream(handle);
  if (stream == nullptr) return unknown_handle("a stream");
  return allocate(MemoryKind::kPool, stream->device, bytes, address);
}

CUresult Functions::MemFreeAsync(CUdeviceptr address, CUstream handle) {
  Stream* const stream = machine().stream(handle);
  if (stream == nullptr) return unknown_handle("a stream");
  Allocation* const memory =
      machine().memory.remove(address, MemoryKind::kPool, MemoryKind::kDevice);
  if (memory == nullptr) return unknown_handle("memory for cuMemFreeAsync");
  machine().enqueue(*stream, "free",
                    [memory](Stream::Random&) {
                      if (memory->uses.load(std::memory_order_relaxed) > 0) {
                        in_use(*memory, "cuMemFreeAsync");
                      }
                      machine().memory.release(*memory);
                    },
                    {});
  return kSuccess;
}

CUresult Functions::MemHostAlloc(void** data, std::size_t bytes, unsigned) {
  CUdeviceptr address = 0;
  const CUresult result =
      allocate(MemoryKind::kPinned, machine().current()->ordinal, bytes, &address);
  if (result == kSuccess) *data = host(address);
  return result;
}

CUresult Functions::MemFreeHost(void* data) {
  Allocation* const memory = machine().memory.remove(std::bit_cast<std::uintptr_t>(data),
                                                     MemoryKind::kPinned, MemoryKind::kPinned);
  if (memory == nullptr) return unknown_handle("memory for cuMemFreeHost");
  if (memory->uses.load(std::memory_order_relaxed) > 0) return in_use(*memory, "cuMemFreeHost");
  machine().memory.release(*memory);
  return kSuccess;
}

CUresult Functions::MemHostRegister(void* data, std::size_t bytes, unsigned) {
  if (bytes == 0 || data == nullptr) return kInvalidValue;
  machine().memory.register_host(static_cast<std::byte*>(data), bytes);
  return kSuccess;
}

CUresult Functions::MemHostUnregister(void* data) {
  bool used = false;
  if (!machine().memory.unregister_host(std::bit_cast<std::uintptr_t>(data), used)) {
    return unknown_handle("memory for cuMemHostUnregister");
  }
  return used ? machine().misuse("cuMemHostUnregister of memory that a stream still uses")
              : kSuccess;
}

CUresult Functions::MemHostGetDevicePointer(CUdeviceptr* address, void* data, unsigned) {
  *address = std::bit_cast<std::uintptr_t>(data);
  return machine().memory.find(*address) != nullptr ? kSuccess : kInvalidValue;
}

CUresult Functions::MemcpyHtoDAsync(CUdeviceptr to, const void* from, std::size_t bytes,
                                    CUstream handle) {
  constexpr const char* kWhat = "copy to the GPU";
  if (is_pinned(from, bytes)) {
    return copy(kWhat, to, std::bit_cast<std::uintptr_t>(from), bytes, handle);
  }
  // As in CUDA, the caller may change memory that is not pinned once the call has returned.
  Stream* const stream = machine().stream(handle);
  if (stream == nullptr) return unknown_handle("a stream");
  if (bytes == 0) return kSuccess;
  Allocation* const target = machine().find_accessible(kWhat, to, bytes);
  if (target == nullptr) return kInvalidValue;
  const auto* const first = static_cast<const std::byte*>(from);
  machine().enqueue(*stream, kWhat,
                    [to, staged = std::vector<std::byte>(first, first + bytes)](Stream::Random&) {
                      std::memcpy(host(to), staged.data(), staged.size());
                    },
                    {target});
  return kSuccess;
}

CUresult Functions::MemcpyDtoHAsync(void* to, CUdeviceptr from, std::size_t bytes,
                                    CUstream handle) {
  constexpr const char* kWhat = "copy from the GPU";
  if (is_pinned(to, bytes)) {
    return copy(kWhat, std::bit_cast<std::uintptr_t>(to), from, bytes, handle);
  }
  // As in CUDA, a copy into memory that is not pinned is complete when the call returns.
  Stream* const stream = machine().stream(handle);
  if (stream == nullptr) return unknown_handle("a stream");
  if (bytes == 0) return kSuccess;
  Allocation* const source = machine().find_accessible(kWhat, from, bytes);
  if (source == nullptr) return kInvalidValue;
  machine().enqueue(*stream, kWhat,
                    [to, from, bytes](Stream::Random&) { std::memcpy(to, host(from), bytes); },
                    {source});
  ++machine().host_waits;
  return machine().wait_for_stream("a copy to memory that is not pinned", *stream);
}

CUresult Functions::MemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, std::size_t bytes,
                                    CUstream handle) {
  return copy("copy on the GPU", to, from, bytes, handle);
}

CUresult Functions::MemsetD8Async(CUdeviceptr to, unsigned char value, std::size_t bytes,
                                  CUstream handle) {
  Stream* const stream = machine().stream(handle);
  if (stream == nullptr) return unknown_handle("a stream");
  if (bytes == 0) return kSuccess;
  Allocation* const target = machine().find_accessible("memset", to, bytes);
  if (target == nullptr) return kInvalidValue;
  machine().enqueue(*stream, "memset",
                    [to, value, bytes](Stream::Random&) { std::memset(host(to), value, bytes); },
                    {target});
  return kSuccess;
}

CUresult Functions::PointerGetAttribute(void* value, CUpointer_attribute which,
                                        CUdeviceptr address) {
  const Allocation* const memory = machine().memory.find(address);
  if (memory == nullptr) return kInvalidValue;  // for example pageable host memory
  const bool is_host = memory->kind == MemoryKind::kPinned;
  switch (which) {
    case kMemoryType:
      return store(value, is_host ? kHostMemory : kDeviceMemory);
    case kDeviceOrdinal:
      return store(value, memory->device);
    case kIpcCapable:
      return store(value, static_cast<int>(memory->kind == MemoryKind::kDevice));
    case kRangeStartAddress:
      return store(value, CUdeviceptr{std::bit_cast<std::uintptr_t>(memory->data)});
    case kRangeSize:
      return store(value, memory->bytes);
    default:
      return kInvalidValue;
  }
}

}  // namespace horoplug::testing::simulated
