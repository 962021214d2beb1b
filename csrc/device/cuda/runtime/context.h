// What belongs to a GPU, each with its end: context, stream, event, memory, module. All of it
// lives within the GPU's primary context, which the frameworks use too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "device/cuda/driver/driver.h"

namespace horoplug::cuda {

// The primary context of device `ordinal`. It outlives everything that is made in it, and the table
// outlives it. Constructors here throw Error; destructors ignore errors, as after a failure of the
// GPU every call fails.
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

// Makes a context that of this thread, and gives back what the thread had.
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
  // Apart from the default stream. Lower numbers go first; the GPU limits them.
  explicit Stream(const Context& context, int priority = 0);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  CUstream handle() const { return stream_; }
  // What is put into this stream from now on waits for what the event stands for; the host does
  // not.
  void wait_for(CUevent event) const;
  // Blocks the host: for tests and the end.
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
  // Stands for all that is in the stream now.
  void record(CUstream stream) const;
  // Whether it has come to pass; true if it was never recorded.
  bool done() const;

 private:
  const Context& context_;
  CUevent event_ = nullptr;
};

class DeviceMemory {
 public:
  // Giving it back waits for all that is under way on the GPU.
  DeviceMemory(const Context& context, std::size_t bytes);
  // In the order of a stream: it is there from where the stream is now until where it is then, and
  // the host does not wait.
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

// Of the host, for copies that do not wait.
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
