// Driver functions: streams, host functions and events.
#include <atomic>
#include <bit>
#include <chrono>
#include <thread>

#include "tests/simulated/functions.h"

namespace horoplug::testing::simulated {

using namespace horoplug::cuda;

namespace {

std::atomic_ref<std::uint32_t> word_at(CUdeviceptr address) {
  return std::atomic_ref(*std::bit_cast<std::uint32_t*>(static_cast<std::uintptr_t>(address)));
}

}  // namespace

CUresult Functions::StreamCreateWithPriority(CUstream* made, unsigned flags, int) {
  if (flags > kStreamNonBlocking) return kInvalidValue;
  *made = reinterpret_cast<CUstream>(machine().make_stream(machine().current()->ordinal, flags));
  return kSuccess;
}

CUresult Functions::StreamDestroy(CUstream handle) {
  if (!machine().destroy(handle)) return unknown_handle("a stream");
  reinterpret_cast<Stream*>(handle)->close();
  return kSuccess;
}

CUresult Functions::StreamWaitEvent(CUstream stream_handle, CUevent event_handle, unsigned) {
  Stream* const stream = machine().stream(stream_handle);
  if (stream == nullptr) return unknown_handle("a stream");
  const Event* const event = machine().event(event_handle);
  if (event == nullptr) return unknown_handle("an event");
  const std::uint32_t record = event->state->recorded.load(std::memory_order_relaxed);
  if (record == 0) return kSuccess;
  machine().enqueue(*stream, "wait for an event",
                    [state = event->state, record](Stream::Random&) {
                      wait_for(state->slot(record), record, [] {
                        return machine().streams_state.stopped.load(std::memory_order_relaxed);
                      });
                    },
                    {});
  return kSuccess;
}

CUresult Functions::StreamSynchronize(CUstream handle) {
  Stream* const stream = machine().stream(handle);
  if (stream == nullptr) return unknown_handle("a stream");
  ++machine().host_waits;
  return machine().wait_for_stream("cuStreamSynchronize", *stream);
}

CUresult Functions::StreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
  const Stream* const stream = machine().stream(handle);
  if (stream == nullptr) return unknown_handle("a stream");
  *status = stream->capture_status.load();
  return kSuccess;
}

CUresult Functions::StreamWriteValue32(CUstream handle, CUdeviceptr word, std::uint32_t value,
                                       unsigned flags) {
  Stream* const stream = machine().stream(handle);
  if (stream == nullptr) return unknown_handle("a stream");
  Allocation* const memory = machine().find_accessible("a write of a word", word, sizeof value);
  if (memory == nullptr || word % sizeof value != 0 || flags != 0) return kInvalidValue;
  machine().enqueue(*stream, "write of a word",
                    [word, value](Stream::Random&) { word_at(word).store(value); }, {memory});
  return kSuccess;
}

CUresult Functions::StreamWaitValue32(CUstream handle, CUdeviceptr word, std::uint32_t value,
                                      unsigned flags) {
  Stream* const stream = machine().stream(handle);
  if (stream == nullptr) return unknown_handle("a stream");
  Allocation* const memory = machine().find_accessible("a wait for a word", word, sizeof value);
  if (memory == nullptr || word % sizeof value != 0 || flags != kWaitAtLeast) return kInvalidValue;
  machine().enqueue(*stream, "wait for a word",
                    [word, value](Stream::Random&) {
                      while (static_cast<std::int32_t>(word_at(word).load() - value) < 0 &&
                             !machine().streams_state.stopped.load(std::memory_order_relaxed)) {
                        std::this_thread::sleep_for(std::chrono::microseconds(20));
                      }
                    },
                    {memory});
  return kSuccess;
}

CUresult Functions::LaunchHostFunc(CUstream handle, CUhostFn function, void* data) {
  Stream* const stream = machine().stream(handle);
  if (stream == nullptr) return unknown_handle("a stream");
  machine().enqueue(*stream, "host function", [function, data](Stream::Random&) { function(data); },
                    {});
  return kSuccess;
}

CUresult Functions::EventCreate(CUevent* made, unsigned flags) {
  const bool shared = (flags & kEventInterprocess) != 0;
  if (shared && ((flags & kEventDisableTiming) == 0 || !machine().options.ipc_events)) {
    return kInvalidValue;
  }
  *made = reinterpret_cast<CUevent>(machine().make_event(machine().current()->ordinal, flags));
  return kSuccess;
}

CUresult Functions::EventDestroy(CUevent handle) {
  const Event* const event = machine().event(handle);
  if (event == nullptr) return unknown_handle("an event");
  machine().destroy(handle);
  if (!event->name.empty() && !event->imported) machine().named_memory.remove(event->name);
  return kSuccess;
}

CUresult Functions::EventRecord(CUevent event_handle, CUstream stream_handle) {
  const Event* const event = machine().event(event_handle);
  if (event == nullptr) return unknown_handle("an event");
  Stream* const stream = machine().stream(stream_handle);
  if (stream == nullptr) return unknown_handle("a stream");
  if (event->device != stream->device) {
    return machine().misuse("an event and its stream are not of one device", kInvalidHandle);
  }
  EventState* const state = event->state;
  const std::uint32_t record = state->recorded.fetch_add(1, std::memory_order_relaxed) + 1;
  machine().enqueue(*stream, "record of an event",
                    [state, record](Stream::Random&) { advance_to(state->slot(record), record); },
                    {});
  return kSuccess;
}

CUresult Functions::EventQuery(CUevent handle) {
  const Event* const event = machine().event(handle);
  if (event == nullptr) return unknown_handle("an event");
  const std::uint32_t record = event->state->recorded.load(std::memory_order_relaxed);
  return record == 0 || reached(event->state->slot(record), record) ? kSuccess : kNotReady;
}

CUresult Functions::EventSynchronize(CUevent handle) {
  Event* const event = machine().event(handle);
  if (event == nullptr) return unknown_handle("an event");
  ++machine().host_waits;
  const std::uint32_t record = event->state->recorded.load(std::memory_order_relaxed);
  return record == 0 ? kSuccess : machine().wait_for_record("cuEventSynchronize", *event, record);
}

}  // namespace horoplug::testing::simulated
