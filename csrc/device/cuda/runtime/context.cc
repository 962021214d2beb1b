#include "device/cuda/runtime/context.h"

namespace horoplug::cuda {

Context::Context(const DriverApi& api, int ordinal) : api_(api) {
  check(api_.DeviceGet(&device_, ordinal), "cuDeviceGet");
  properties_ = device_properties(api_, ordinal);
  check(api_.DevicePrimaryCtxRetain(&context_, device_), "cuDevicePrimaryCtxRetain");
}
Context::~Context() { api_.DevicePrimaryCtxRelease(device_); }

Current::Current(const Context& context) : api_(context.api()) {
  context.check(api_.CtxPushCurrent(context.handle()), "cuCtxPushCurrent");
}
Current::~Current() {
  CUcontext popped = nullptr;
  api_.CtxPopCurrent(&popped);
}

namespace {

// Releases a resource in its context. If the GPU has failed, there is nothing to release.
template <typename End>
void end_in(const Context& context, const End& end) {
  if (context.api().CtxPushCurrent(context.handle()) != kSuccess) return;
  end(context.api());
  CUcontext popped = nullptr;
  context.api().CtxPopCurrent(&popped);
}

}  // namespace

Stream::Stream(const Context& context, int priority) : context_(context) {
  const Current current(context_);
  context_.check(context_.api().StreamCreateWithPriority(&stream_, kStreamNonBlocking, priority),
                 "cuStreamCreateWithPriority");
}
Stream::~Stream() {
  end_in(context_, [this](const DriverApi& api) { api.StreamDestroy(stream_); });
}
void Stream::wait_for(CUevent event) const {
  const Current current(context_);
  context_.check(context_.api().StreamWaitEvent(stream_, event, 0), "cuStreamWaitEvent");
}
void Stream::synchronize() const {
  const Current current(context_);
  context_.check(context_.api().StreamSynchronize(stream_), "cuStreamSynchronize");
}

Event::Event(const Context& context) : context_(context) {
  const Current current(context_);
  context_.check(context_.api().EventCreate(&event_, kEventDisableTiming), "cuEventCreate");
}
Event::~Event() {
  end_in(context_, [this](const DriverApi& api) { api.EventDestroy(event_); });
}
void Event::record(CUstream stream) const {
  const Current current(context_);
  context_.check(context_.api().EventRecord(event_, stream), "cuEventRecord");
}
bool Event::done() const {
  const Current current(context_);
  const CUresult result = context_.api().EventQuery(event_);
  if (result == kNotReady) return false;
  context_.check(result, "cuEventQuery");
  return true;
}

DeviceMemory::DeviceMemory(const Context& context, std::size_t bytes)
    : context_(context), bytes_(bytes) {
  const Current current(context_);
  context_.check(context_.api().MemAlloc(&address_, bytes),
                 "cuMemAlloc of " + std::to_string(bytes) + " bytes");
}
DeviceMemory::DeviceMemory(const Context& context, std::size_t bytes, CUstream stream)
    : context_(context), bytes_(bytes), stream_(stream) {
  const Current current(context_);
  context_.check(context_.api().MemAllocAsync(&address_, bytes, stream),
                 "cuMemAllocAsync of " + std::to_string(bytes) + " bytes");
}
DeviceMemory::~DeviceMemory() {
  end_in(context_, [this](const DriverApi& api) {
    if (stream_ != nullptr) {
      api.MemFreeAsync(address_, stream_);
    } else {
      api.MemFree(address_);
    }
  });
}

PinnedMemory::PinnedMemory(const Context& context, std::size_t bytes)
    : context_(context), bytes_(bytes) {
  const Current current(context_);
  context_.check(context_.api().MemHostAlloc(&data_, bytes, kHostPortable),
                 "cuMemHostAlloc of " + std::to_string(bytes) + " bytes");
}
PinnedMemory::~PinnedMemory() {
  end_in(context_, [this](const DriverApi& api) { api.MemFreeHost(data_); });
}

Module::Module(const Context& context, const std::string& image) : context_(context) {
  const Current current(context_);
  context_.check(context_.api().ModuleLoadDataEx(&module_, image.data(), 0, nullptr, nullptr),
                 "cuModuleLoadDataEx");
}
Module::~Module() {
  end_in(context_, [this](const DriverApi& api) { api.ModuleUnload(module_); });
}
CUfunction Module::function(const std::string& name) const {
  const Current current(context_);
  CUfunction function = nullptr;
  context_.check(context_.api().ModuleGetFunction(&function, module_, name.c_str()),
                 "cuModuleGetFunction of " + name);
  return function;
}

}  // namespace horoplug::cuda
