#include "device/cuda/runtime/device.h"

#include <algorithm>

#include "base/status.h"

namespace horoplug::cuda {
namespace {

// The number of events that are checked at once.
constexpr std::size_t kManyUnderWay = 64;

}  // namespace

std::shared_ptr<Device> Device::open(std::shared_ptr<const Toolkit> toolkit, int ordinal, Log log) {
  return std::shared_ptr<Device>(new Device(std::move(toolkit), ordinal, std::move(log)));
}

Device::Device(std::shared_ptr<const Toolkit> toolkit, int ordinal, Log log)
    : toolkit_(std::move(toolkit)),
      ordinal_(ordinal),
      log_(std::move(log)),
      context_(toolkit_->driver, ordinal),
      kernels_(std::make_shared<LoadedKernels>(context_, toolkit_->images)) {}

std::unique_ptr<Event> Device::free_event() {
  std::lock_guard lock(mutex_);
  if (free_events_.empty()) return std::make_unique<Event>(context_);
  std::unique_ptr<Event> event = std::move(free_events_.back());
  free_events_.pop_back();
  return event;
}

void Device::give_back(std::unique_ptr<Event> event) {
  std::lock_guard lock(mutex_);
  free_events_.push_back(std::move(event));
}

void Device::track(CUstream stream) {
  if (under_way_.size() >= kManyUnderWay) idle();
  const Current current(context_);
  under_way_.push_back(free_event());
  under_way_.back()->record(stream);
}

bool Device::idle() {
  std::vector<std::unique_ptr<Event>> left;
  for (std::unique_ptr<Event>& end : under_way_) {
    if (end->done()) {
      give_back(std::move(end));
    } else {
      left.push_back(std::move(end));
    }
  }
  under_way_ = std::move(left);
  return under_way_.empty();
}

void Device::refuse_capture(CUstream stream) const {
  const Current current(context_);
  CUstreamCaptureStatus status = kNotCapturing;
  context_.check(context_.api().StreamIsCapturing(stream, &status), "cuStreamIsCapturing");
  if (status == kNotCapturing) return;
  throw Error(HP_UNSUPPORTED,
              "a CUDA graph is being captured from the stream, and what replaying it would "
              "repeat the other ranks would not know of; call horoplug outside of the capture");
}

EventPtr Device::mark(CUstream stream) {
  const Current current(context_);
  std::unique_ptr<Event> event = free_event();
  event->record(stream);
  return {event.release(), [device = shared_from_this()](Event* done) {
            device->give_back(std::unique_ptr<Event>(done));
          }};
}

void Device::make_wait(CUstream stream, const Event& event) const {
  const Current current(context_);
  context_.check(context_.api().StreamWaitEvent(stream, event.handle(), 0), "cuStreamWaitEvent");
}

void Device::copy(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream stream) const {
  const Current current(context_);
  context_.check(context_.api().MemcpyDtoDAsync(to, from, bytes, stream), "cuMemcpyDtoDAsync");
}

CUdeviceptr Device::allocate(std::size_t bytes, CUstream first_used_by) const {
  const Current current(context_);
  CUdeviceptr memory = 0;
  context_.check(
      context_.api().MemAllocAsync(&memory, std::max<std::size_t>(bytes, 1), first_used_by),
      "cuMemAllocAsync of " + std::to_string(bytes) + " bytes");
  return memory;
}

void Device::release(CUdeviceptr memory, CUstream last_used_by) const {
  const Current current(context_);
  context_.check(context_.api().MemFreeAsync(memory, last_used_by), "cuMemFreeAsync");
}

}  // namespace horoplug::cuda
