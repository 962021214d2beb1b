#include "log_queue.h"

#include <unistd.h>

#include <condition_variable>
#include <cstdio>
#include <deque>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace horoplug::python {

// Shared with the thread: garbage collection may run inside a delivery and destroy the very engine
// that logs.
struct LogQueue::State {
  Deliver deliver;
  const pid_t process = getpid();
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::pair<std::int32_t, std::string>> messages;
  std::thread::id thread;
  bool closed = false;
  bool done = false;
};

namespace {

using State = LogQueue::State;

constexpr std::size_t kMaxQueued = 4096;

struct Registry {
  std::mutex mutex;
  std::set<std::shared_ptr<State>> queues;
};

// Leaked on purpose: engines may outlive static destruction.
Registry& registry() {
  static auto* instance = new Registry;
  return *instance;
}

void run(State& state) {
  std::unique_lock lock(state.mutex);
  for (;;) {
    state.changed.wait(lock, [&] { return state.closed || !state.messages.empty(); });
    if (state.messages.empty()) break;
    const auto message = std::move(state.messages.front());
    state.messages.pop_front();
    lock.unlock();
    state.deliver(message.first, message.second.c_str());
    lock.lock();
  }
  state.done = true;
  state.changed.notify_all();
}

void close(State& state) {
  // After fork(), the thread belongs to the parent.
  if (state.process != getpid()) return;
  std::unique_lock lock(state.mutex);
  state.closed = true;
  state.changed.notify_all();
  if (state.thread == std::this_thread::get_id()) {
    // This is the delivering thread, and the callable is about to be released.
    state.messages.clear();
    return;
  }
  state.changed.wait(lock, [&] { return state.done; });
}

}  // namespace

LogQueue::LogQueue(Deliver deliver) : state_(std::make_shared<State>()) {
  state_->deliver = std::move(deliver);
  // Detached, with `done` in place of a join, because the last owner may be the thread itself.
  std::thread thread([state = state_] { run(*state); });
  {
    const std::lock_guard lock(state_->mutex);
    state_->thread = thread.get_id();
  }
  thread.detach();
  const std::lock_guard lock(registry().mutex);
  registry().queues.insert(state_);
}

LogQueue::~LogQueue() {
  {
    const std::lock_guard lock(registry().mutex);
    registry().queues.erase(state_);
  }
  close();
}

void LogQueue::write(std::int32_t level, const char* text) {
  {
    const std::lock_guard lock(state_->mutex);
    if (!state_->closed && state_->messages.size() < kMaxQueued) {
      state_->messages.emplace_back(level, text);
      state_->changed.notify_all();
      return;
    }
  }
  std::fprintf(stderr, "horoplug: %s\n", text);
}

void LogQueue::close() { python::close(*state_); }

void LogQueue::close_all() {
  std::vector<std::shared_ptr<State>> queues;
  {
    const std::lock_guard lock(registry().mutex);
    queues.assign(registry().queues.begin(), registry().queues.end());
  }
  for (const auto& queue : queues) python::close(*queue);
}

}  // namespace horoplug::python
