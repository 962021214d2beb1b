#include "tests/simulated/machine.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace horoplug::testing::simulated {

using namespace horoplug::cuda;

namespace {

std::atomic<Machine*> the_machine{nullptr};
std::atomic<std::unique_ptr<Machine> (*)()> factory{nullptr};
std::atomic<std::uint64_t> generations{0};

}  // namespace

Machine::Machine(SimulatedOptions wanted)
    : options(std::move(wanted)),
      named_memory(options.folder),
      memory(named_memory, options.memory),
      generation_(++generations) {
  fill(api);
  for (int i = 0; i < options.devices; ++i) {
    devices[i].ordinal = i;
    devices[i].default_stream = make_stream(i, 0);
    live_.erase(devices[i].default_stream);
  }
  Machine* none = nullptr;
  if (the_machine.compare_exchange_strong(none, this)) return;
  std::fputs("simulated GPU: this process already has one\n", stderr);
  std::abort();
}

Machine::~Machine() {
  streams_state.stopped.store(true, std::memory_order_relaxed);
  wake(streams_state.paused);
  streams_.clear();
  the_machine.store(nullptr);
}

Machine& Machine::get() {
  if (Machine* const machine = the_machine.load()) return *machine;
  if (const auto make = factory.load(); make != nullptr) {
    static Machine* const made = make().release();  // once
    return *made;
  }
  std::fputs("simulated GPU: called after its destruction\n", stderr);
  std::abort();
}

void Machine::set_factory(std::unique_ptr<Machine> (*make)()) { factory.store(make); }

CUresult Machine::check_call(std::string_view function, bool in_context) {
  if (is_started() && process_.load() != ::getpid()) return kNotInitialized;
  if (is_lost()) return device_error_.load(std::memory_order_relaxed);
  {
    const std::lock_guard lock(mutex_);
    const auto failure = failures_.find(function);
    if (failure != failures_.end()) return failure->second;
  }
  if (in_context && current() == nullptr) {
    return misuse(std::string(function) + " without a context", kInvalidContext);
  }
  return kSuccess;
}

void Machine::set_failure(const std::string& function, CUresult result) {
  const std::lock_guard lock(mutex_);
  if (result == kSuccess) {
    failures_.erase(function);
  } else {
    failures_[function] = result;
  }
}

void Machine::lose_device(CUresult result) {
  device_error_.store(result, std::memory_order_relaxed);
  streams_state.stopped.store(true, std::memory_order_relaxed);
  wake(streams_state.paused);
}

void Machine::pause() {
  Counter& paused = streams_state.paused;
  const std::uint32_t now = paused.load();
  if (now % 2 == 0) advance_to(paused, now + 1);
}

void Machine::resume() {
  Counter& paused = streams_state.paused;
  const std::uint32_t now = paused.load();
  if (now % 2 == 1) advance_to(paused, now + 1);
}

CUresult Machine::misuse(const std::string& what, CUresult result) {
  std::function<void(const std::string&)> handler;
  {
    const std::lock_guard lock(mutex_);
    handler = on_misuse_;
  }
  if (!handler) {
    std::fprintf(stderr, "simulated GPU: %s (HOROPLUG_TEST_SEED=%u)\n", what.c_str(), options.seed);
    std::abort();
  }
  handler(what);
  return result;
}

void Machine::on_misuse(std::function<void(const std::string&)> handler) {
  const std::lock_guard lock(mutex_);
  on_misuse_ = std::move(handler);
}

std::vector<Device*>& Machine::contexts() {
  thread_local std::uint64_t generation = 0;
  thread_local std::vector<Device*> stack;
  if (std::exchange(generation, generation_) != generation_) stack.clear();
  return stack;
}

Device* Machine::current() { return contexts().empty() ? nullptr : contexts().back(); }

Stream* Machine::stream(CUstream handle) {
  const auto number = std::bit_cast<std::uintptr_t>(handle);
  if (number <= 2) return current()->default_stream;  // the legacy or the per-thread default stream
  const std::lock_guard lock(mutex_);
  return live_.contains(handle) ? reinterpret_cast<Stream*>(handle) : nullptr;
}

Event* Machine::event(CUevent handle) {
  const std::lock_guard lock(mutex_);
  return live_.contains(handle) ? reinterpret_cast<Event*>(handle) : nullptr;
}

Module* Machine::module(CUmodule handle) {
  const std::lock_guard lock(mutex_);
  return live_.contains(handle) ? reinterpret_cast<Module*>(handle) : nullptr;
}

Kernel* Machine::kernel(CUfunction handle) {
  const std::lock_guard lock(mutex_);
  for (Kernel& kernel : kernels_) {
    if (reinterpret_cast<CUfunction>(&kernel) != handle) continue;
    return live_.contains(kernel.module) ? &kernel : nullptr;
  }
  return nullptr;
}

Stream* Machine::make_stream(int device, unsigned flags) {
  const std::lock_guard lock(mutex_);
  const auto number = static_cast<unsigned>(streams_.size());
  Stream& made = streams_.emplace_back(streams_state, device, number, flags, options.seed,
                                       options.longest_delay);
  live_.insert(&made);
  return &made;
}

Event* Machine::make_event(int device, unsigned flags) {
  const std::lock_guard lock(mutex_);
  const unsigned number = event_numbers_++;
  EventState* state = nullptr;
  std::string name;
  if ((flags & kEventInterprocess) != 0) {
    name = "event-" + std::to_string(::getpid()) + "-" + std::to_string(number);
    state = reinterpret_cast<EventState*>(named_memory.open(name, sizeof(EventState)));
  } else {
    state = &event_states_.emplace_back();
  }
  Event& made = events_.emplace_back(Event{device, flags, number, state, name});
  live_.insert(&made);
  return &made;
}

Event* Machine::open_event(const std::string& name, int device) {
  const std::lock_guard lock(mutex_);
  auto* const state =
      reinterpret_cast<EventState*>(named_memory.open(name, sizeof(EventState), /*create=*/false));
  if (state == nullptr) return nullptr;
  Event& made = events_.emplace_back(
      Event{device, kEventDisableTiming, event_numbers_++, state, name, /*imported=*/true});
  live_.insert(&made);
  return &made;
}

Module* Machine::make_module(int device, std::string kernel) {
  const std::lock_guard lock(mutex_);
  Module& made = modules_.emplace_back(Module{device, std::move(kernel)});
  live_.insert(&made);
  return &made;
}

Kernel* Machine::make_kernel(const Module& module, std::string name) {
  const std::lock_guard lock(mutex_);
  return &kernels_.emplace_back(Kernel{&module, std::move(name)});
}

bool Machine::destroy(const void* handle) {
  const std::lock_guard lock(mutex_);
  return live_.erase(handle) == 1;
}

Allocation* Machine::find_accessible(const char* call, CUdeviceptr address, std::size_t bytes) {
  Allocation* const found = memory.find(address);
  if (found != nullptr && found->holds(address, bytes)) return found;
  char text[200];
  std::snprintf(text, sizeof text, "%s of %zu bytes at %#llx, %s", call, bytes, address,
                found == nullptr ? "which is no memory of the GPU" : "beyond the memory's end");
  misuse(text);
  return nullptr;
}

std::vector<Allocation*> Machine::referenced(const std::vector<std::byte>& args) {
  std::vector<Allocation*> found;
  for (std::size_t at = 0; at + sizeof(CUdeviceptr) <= args.size(); at += sizeof(CUdeviceptr)) {
    CUdeviceptr word = 0;
    std::memcpy(&word, args.data() + at, sizeof word);
    if (Allocation* const memory_there = memory.find(word)) found.push_back(memory_there);
  }
  return found;
}

void Machine::enqueue(Stream& stream, const char* what, Stream::Work work,
                      std::vector<Allocation*> uses) {
  {
    const std::lock_guard lock(mutex_);
    ++counts_[what];
  }
  stream.enqueue(what, std::move(work), std::move(uses));
}

CUresult Machine::wait(const char* call, Counter& counter, std::uint32_t target) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point deadline = Clock::now() + options.wait_timeout;
  const bool done = wait_for(counter, target, [&] { return is_lost() || Clock::now() > deadline; });
  if (is_lost()) return device_error_.load(std::memory_order_relaxed);
  if (done) return kSuccess;
  return misuse(std::string(call) + " has waited for " +
                std::to_string(options.wait_timeout.count()) + " s." + streams_at_work());
}

CUresult Machine::wait_for_stream(const char* call, Stream& stream) {
  return wait(call, stream.done(), stream.size());
}

CUresult Machine::wait_for_device(const char* call, int device) {
  std::vector<Stream*> all;
  {
    const std::lock_guard lock(mutex_);
    for (Stream& stream : streams_) {
      if (stream.device == device) all.push_back(&stream);
    }
  }
  for (Stream* const stream : all) {
    if (const CUresult result = wait_for_stream(call, *stream); result != kSuccess) return result;
  }
  return kSuccess;
}

CUresult Machine::wait_for_record(const char* call, Event& event, std::uint32_t record) {
  return wait(call, event.state->slot(record), record);
}

std::string Machine::streams_at_work() {
  const std::lock_guard lock(mutex_);
  std::string text;
  for (Stream& stream : streams_) {
    const std::uint32_t done = stream.done().load(std::memory_order_relaxed);
    if (done == stream.size()) continue;
    const char* const doing = stream.doing();
    text += " Stream " + std::to_string(stream.number) + " of device " +
            std::to_string(stream.device) + " has done " + std::to_string(done) + " of " +
            std::to_string(stream.size()) +
            ", and is at: " + (doing != nullptr ? doing : "nothing") + ".";
  }
  return text;
}

std::size_t Machine::alive() {
  std::size_t retained = 0;
  for (const Device& device : devices) retained += device.retained.load() > 0 ? 1 : 0;
  const std::size_t allocations = memory.alive();
  const std::lock_guard lock(mutex_);
  return retained + allocations + live_.size();
}

std::size_t Machine::count(const std::string& what) {
  const std::lock_guard lock(mutex_);
  const auto found = counts_.find(what);
  return found == counts_.end() ? 0 : found->second;
}

}  // namespace horoplug::testing::simulated
