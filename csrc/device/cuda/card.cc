#include "device/cuda/card.h"

#include <algorithm>

#include "base/status.h"

namespace horoplug::cuda {
std::shared_ptr<Card> Card::open(std::shared_ptr<const Toolkit> toolkit, int ordinal, Log log) {
  return std::shared_ptr<Card>(new Card(std::move(toolkit), ordinal, std::move(log)));
}

Card::Card(std::shared_ptr<const Toolkit> toolkit, int ordinal, Log log)
    : toolkit_(std::move(toolkit)),
      ordinal_(ordinal),
      log_(std::move(log)),
      context_(toolkit_->driver, ordinal) {}

EventPtr Card::mark(CUstream stream) {
  const Current current(context_);
  CUstreamCaptureStatus status = kNotCapturing;
  context_.check(context_.api().StreamIsCapturing(stream, &status), "cuStreamIsCapturing");
  if (status != kNotCapturing) {
    throw Error(HP_UNSUPPORTED,
                "a CUDA graph is being captured from the stream, and what replaying it would "
                "repeat the other ranks would not know of; call horoplug outside of the capture");
  }
  std::unique_ptr<Event> event;
  {
    std::lock_guard lock(mutex_);
    if (!free_events_.empty()) {
      event = std::move(free_events_.back());
      free_events_.pop_back();
    }
  }
  if (!event) event = std::make_unique<Event>(context_);
  event->record(stream);
  return {event.release(), [card = shared_from_this()](Event* done) {
            std::unique_ptr<Event> owned(done);
            std::lock_guard lock(card->mutex_);
            card->free_events_.push_back(std::move(owned));
          }};
}

void Card::make_wait(CUstream stream, const Event& event) const {
  const Current current(context_);
  context_.check(context_.api().StreamWaitEvent(stream, event.handle(), 0), "cuStreamWaitEvent");
}

CUdeviceptr Card::allocate(std::size_t bytes, CUstream first_used_by) const {
  const Current current(context_);
  CUdeviceptr memory = 0;
  context_.check(
      context_.api().MemAllocAsync(&memory, std::max<std::size_t>(bytes, 1), first_used_by),
      "cuMemAllocAsync of " + std::to_string(bytes) + " bytes");
  return memory;
}

void Card::release(CUdeviceptr memory, CUstream last_used_by) const {
  const Current current(context_);
  context_.check(context_.api().MemFreeAsync(memory, last_used_by), "cuMemFreeAsync");
}

}  // namespace horoplug::cuda
