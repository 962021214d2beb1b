// RAII wrappers of GPU resources: context, stream, event, memory, module. All of them belong to the
// GPU's primary context, which the frameworks use as well.
#pragma once

#include <cstddef>
#include <string>

#include "device/cuda/driver/driver.h"

namespace horoplug::cuda {

// The primary context of device `ordinal`. It must outlive everything that is created in it, and
// the function table must outlive it. Constructors throw Error; destructors ignore errors, because
// after a failure of the GPU every call fails.
class Context {
 public:
  Context(const DriverApi& api, int ordinal);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  const DriverApi& api() const { return api_; }
  CUcontext handle() const { return context_; }
  CUdevice device() const { return device_; }
  int capability() const { return 10 * properties_.major + properties_.minor; }
  const DeviceProperties& properties() const { return properties_; }
  void check(CUresult result, std::string_view call) const { cuda::check(api_, result, call); }

 private:
  const DriverApi& api_;
  CUdevice device_ = 0;
  DeviceProperties properties_;
  CUcontext context_ = nullptr;
};

// Makes a context current on this thread, and restores the previous one.
class Current {
 public:
  explicit Current(const Context& context);
  ~Current();
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  const DriverApi& api_;
};

class Stream {
 public:
  // Independent of the default stream. Lower numbers have priority, within the GPU's limits.
  explicit Stream(const Context& context, int priority = 0);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  CUstream handle() const { return stream_; }
  // Later work in this stream waits for the event; the CPU does not wait.
  void wait_for(CUevent event) const;
  // Blocks the calling thread: for tests and shutdown.
  void synchronize() const;

 private:
  const Context& context_;
  CUstream stream_ = nullptr;
};

class Event {
 public:
  explicit Event(const Context& context);
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  CUevent handle() const { return event_; }
  // Records all work that is in the stream now.
  void record(CUstream stream) const;
  // Whether the recorded work is done; true if nothing was recorded.
  bool done() const;

 private:
  const Context& context_;
  CUevent event_ = nullptr;
};

class DeviceMemory {
 public:
  // Freeing it waits for all work on the GPU.
  DeviceMemory(const Context& context, std::size_t bytes);
  // Allocated and freed in stream order: usable from the stream's present position up to its
  // position at the release. The CPU does not wait.
  DeviceMemory(const Context& context, std::size_t bytes, CUstream stream);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  CUdeviceptr address() const { return address_; }
  std::size_t bytes() const { return bytes_; }

 private:
  const Context& context_;
  CUdeviceptr address_ = 0;
  std::size_t bytes_;
  CUstream stream_ = nullptr;
};

// Pinned memory, for asynchronous copies.
class PinnedMemory {
 public:
  PinnedMemory(const Context& context, std::size_t bytes);
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(data_); }
  std::size_t bytes() const { return bytes_; }

 private:
  const Context& context_;
  void* data_ = nullptr;
  std::size_t bytes_;
};

class Module {
 public:
  // `image`: see compile.h.
  Module(const Context& context, const std::string& image);
  ~Module();
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  CUfunction function(const std::string& name) const;

 private:
  const Context& context_;
  CUmodule module_ = nullptr;
};

}  // namespace horoplug::cuda
