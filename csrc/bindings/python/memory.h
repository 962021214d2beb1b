// Memory of the core that Python objects own.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "horoplug/horoplug.h"
#include "process.h"

namespace horoplug::python {

inline void* to_stream(std::uintptr_t stream) { return reinterpret_cast<void*>(stream); }

// Memory of the CPU of a result.
class Memory {
 public:
  Memory(void* data, std::int64_t bytes) : data_(data), bytes_(bytes) {}
  ~Memory() { hp_free(data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::uintptr_t address() const { return reinterpret_cast<std::uintptr_t>(data_); }
  std::int64_t bytes() const { return bytes_; }
  pybind11::buffer_info buffer() const;

 private:
  void* data_;
  std::int64_t bytes_;
};

// Memory on a GPU. It is freed in the order of a stream, which must outlive it.
class DeviceMemory {
 public:
  DeviceMemory(hp_device_memory* memory, std::int64_t bytes, int device, std::uintptr_t stream)
      : memory_(memory), bytes_(bytes), device_(device), stream_(stream) {}
  ~DeviceMemory() {
    // A forked child has no CUDA, and the memory is its parent's.
    if (generation_ == fork_generation) hp_device_memory_free(memory_);
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  std::uintptr_t address() const {
    return reinterpret_cast<std::uintptr_t>(hp_device_memory_data(memory_));
  }
  std::int64_t bytes() const { return bytes_; }
  int device() const { return device_; }
  std::uintptr_t stream() const { return stream_; }

  // __cuda_array_interface__, version 3, without a stream: the stream in which the memory is used
  // waits for the data already.
  pybind11::dict interface() const;

 private:
  hp_device_memory* memory_;
  std::int64_t bytes_;
  int device_;
  std::uintptr_t stream_;
  int generation_ = fork_generation;
};

// This rank's part of a shared buffer. Does not depend on the engine that created it: arrays over
// it may outlive the engine.
class Buffer {
 public:
  explicit Buffer(hp_buffer* buffer) : buffer_(buffer) {}
  ~Buffer() { hp_buffer_free(buffer_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  std::uintptr_t address() const {
    return reinterpret_cast<std::uintptr_t>(hp_buffer_data(buffer_));
  }
  std::int64_t bytes() const { return static_cast<std::int64_t>(hp_buffer_size(buffer_)); }
  pybind11::buffer_info buffer() const;

 private:
  hp_buffer* const buffer_;
};

// Adds these classes, and address_of, to the module.
void add_memory(pybind11::module_& module);

}  // namespace horoplug::python
