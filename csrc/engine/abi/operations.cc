// The C ABI of operations, from their submission to the release of their handles.
#include <vector>

#include "engine/abi/abi.h"
#include "engine/operations/submission.h"

using namespace horoplug::abi;
using horoplug::Error;
using horoplug::Status;

namespace {

// How long a call may block: unlike a limit, a timeout of 0 is no time at all.
horoplug::Seconds time_to_wait(double timeout) {
  return timeout == 0 ? horoplug::Seconds::zero() : horoplug::time_limit(timeout);
}

}  // namespace

extern "C" {

hp_status hp_submit(hp_engine* engine, const hp_submission* submission, hp_handle* handle) {
  return guarded([&] {
    const hp_submission full = complete(submission);
    const auto running = engine->engine.use();
    const auto members = running->members(checked_set(full.process_set));
    *handle = running->submit(horoplug::make_operation(full, members));
  });
}

hp_status hp_submit_batch(hp_engine* engine, const hp_submission* submissions, int32_t count,
                          hp_handle* handles, int32_t* accepted) {
  *accepted = 0;
  return guarded([&] {
    const auto running = engine->engine.use();
    std::vector<horoplug::OperationPtr> operations;
    operations.reserve(static_cast<std::size_t>(std::max(count, 0)));
    Status refused;
    horoplug::MembersPtr members;
    const auto* at = reinterpret_cast<const char*>(submissions);
    try {
      for (int32_t i = 0; i < count; ++i) {
        const hp_submission full = complete(reinterpret_cast<const hp_submission*>(at));
        at += submissions->struct_size;
        const std::uint32_t set = checked_set(full.process_set);
        if (!members || members->set != set) members = running->members(set);
        operations.push_back(horoplug::make_operation(full, members));
      }
    } catch (const Error& error) {
      refused = error.status();
    }
    const Status late = running->submit_all(operations);
    for (const auto& operation : operations) {
      if (operation->handle == 0) break;
      handles[(*accepted)++] = operation->handle;
    }
    return report(late.ok() ? refused : late);
  });
}

hp_status hp_perform(hp_engine* engine, const hp_submission* submission, double timeout,
                     hp_handle* handle) {
  *handle = 0;
  return guarded([&] {
    const hp_submission full = complete(submission);
    const auto running = engine->engine.use();
    const auto members = running->members(checked_set(full.process_set));
    const auto operation = horoplug::make_operation(full, members);
    const Status status = running->perform(operation, time_to_wait(timeout));
    *handle = operation->handle;
    return report(status);
  });
}

hp_status hp_process_set_add(hp_engine* engine, const int32_t* ranks, int32_t count,
                             hp_handle* handle) {
  return guarded([&] {
    *handle = engine->engine.use()->add_set(std::vector<int>(ranks, ranks + std::max(count, 0)));
  });
}

hp_status hp_process_set_remove(hp_engine* engine, int32_t process_set, hp_handle* handle) {
  return guarded([&] { *handle = engine->engine.use()->remove_set(checked_set(process_set)); });
}

hp_status hp_process_set_size(hp_engine* engine, int32_t process_set, int32_t* size,
                              int32_t* place) {
  return guarded([&] {
    const auto members = engine->engine.use()->any_members(checked_set(process_set));
    if (size != nullptr) *size = members->size();
    if (place != nullptr) *place = members->index;
  });
}

hp_status hp_join(hp_engine* engine, int32_t process_set, hp_handle* handle) {
  return guarded([&] { *handle = engine->engine.use()->join(checked_set(process_set)); });
}

hp_status hp_poll(hp_engine* engine, hp_handle handle) {
  return guarded([&] {
    const auto running = engine->engine.lease();
    return report(running ? running->poll(handle) : engine->engine.handles().poll(handle));
  });
}

hp_status hp_wait(hp_engine* engine, hp_handle handle, double timeout) {
  return guarded([&] {
    const auto running = engine->engine.lease();
    // Without an engine every operation has ended.
    return report(running ? running->wait(handle, time_to_wait(timeout))
                          : engine->engine.handles().poll(handle));
  });
}

hp_status hp_on_done(hp_engine* engine, hp_handle handle, hp_done done, void* context) {
  return guarded([&] {
    const auto running = engine->engine.lease();
    if (running) {
      running->on_done(handle, done, context);
    } else {
      engine->engine.handles().on_done(handle, done, context);
    }
  });
}

hp_status hp_expect_threads(hp_engine* engine, const int64_t* ids, int32_t count) {
  return guarded([&] { engine->engine.handles().expect_threads({ids, ids + std::max(count, 0)}); });
}

hp_status hp_hold_threads(hp_engine* engine, const int64_t* ids, int32_t count) {
  return guarded([&] { engine->engine.handles().hold_threads({ids, ids + std::max(count, 0)}); });
}

hp_status hp_note_wait(hp_engine* engine, hp_handle handle, const int64_t* ids, int32_t count) {
  return guarded([&] {
    engine->engine.handles().note_wait(handle, {ids, static_cast<std::size_t>(std::max(count, 0))});
  });
}

hp_status hp_release(hp_engine* engine, hp_handle handle) {
  return guarded([&] { engine->engine.handles().release(handle); });
}

}  // extern "C"
