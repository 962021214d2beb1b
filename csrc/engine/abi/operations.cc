// The C ABI of operations, from their submission to the release of their handles.
#include <algorithm>
#include <array>
#include <span>
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

// Operations on more tensors are rare.
constexpr std::size_t kFewTensors = 8;

horoplug::OperationPtr start(const hp_engine* engine, const hp_instance& instance) {
  if (instance.prepared == nullptr || instance.prepared->engine != engine) {
    throw Error(HP_INVALID_ARGUMENT, "an operation that was prepared for another engine");
  }
  const horoplug::Prepared& prepared = instance.prepared->operation;
  const std::size_t count = prepared.identity->signature.shapes.size();
  std::array<horoplug::TensorArgument, kFewTensors> few;
  std::vector<horoplug::TensorArgument> many(count > few.size() ? count : 0);
  const std::span tensors(count > few.size() ? many.data() : few.data(), count);
  for (std::size_t i = 0; i < count; ++i) {
    tensors[i] = {static_cast<const std::byte*>(instance.inputs[i]),
                  static_cast<std::byte*>(instance.outputs[i])};
  }
  return horoplug::make_operation(prepared, tensors, instance.stream, instance.pool_thread != 0);
}

// Calls make(i, operations) for each operation of a batch, and submits those before the first one
// that is refused.
template <typename Make>
hp_status submit_in_order(horoplug::Engine& engine, std::int32_t count, hp_handle* handles,
                          std::int32_t* accepted, Make&& make) {
  std::vector<horoplug::OperationPtr> operations;
  operations.reserve(static_cast<std::size_t>(std::max(count, 0)));
  Status refused;
  try {
    for (std::int32_t i = 0; i < count; ++i) operations.push_back(make(i));
  } catch (const Error& error) {
    refused = error.status();
  }
  const Status late = engine.submit_all(operations);
  for (const auto& operation : operations) {
    if (operation->handle == 0) break;
    handles[(*accepted)++] = operation->handle;
  }
  return report(late.ok() ? refused : late);
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
    horoplug::MembersPtr members;
    return submit_in_order(*running.operator->(), count, handles, accepted, [&](std::int32_t i) {
      const auto* const at = reinterpret_cast<const char*>(submissions) +
                             static_cast<std::size_t>(i) * submissions->struct_size;
      const hp_submission full = complete(reinterpret_cast<const hp_submission*>(at));
      const std::uint32_t set = checked_set(full.process_set);
      if (!members || members->set != set) members = running->members(set);
      return horoplug::make_operation(full, members);
    });
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
    engine->engine.handles().keep(operation);
    *handle = operation->handle;
    return report(status);
  });
}

hp_status hp_prepare(hp_engine* engine, const hp_submission* submission, hp_prepared** prepared) {
  return guarded([&] {
    const hp_submission full = complete(submission);
    const auto members = engine->engine.use()->members(checked_set(full.process_set));
    *prepared = new hp_prepared{engine, horoplug::prepare(full, members)};
  });
}

void hp_prepared_free(hp_prepared* prepared) { delete prepared; }

hp_status hp_start(hp_engine* engine, const hp_instance* instances, int32_t count,
                   hp_handle* handles, int32_t* accepted) {
  *accepted = 0;
  return guarded([&] {
    const auto running = engine->engine.use();
    if (count == 1) {
      *handles = running->submit(start(engine, complete(instances)));
      *accepted = 1;
      return HP_OK;
    }
    return submit_in_order(*running.operator->(), count, handles, accepted, [&](std::int32_t i) {
      const auto* const at = reinterpret_cast<const char*>(instances) +
                             static_cast<std::size_t>(i) * instances->struct_size;
      return start(engine, complete(reinterpret_cast<const hp_instance*>(at)));
    });
  });
}

hp_status hp_start_and_wait(hp_engine* engine, const hp_instance* instance, double timeout,
                            hp_handle* handle) {
  *handle = 0;
  return guarded([&] {
    const auto running = engine->engine.use();
    const auto operation = start(engine, complete(instance));
    const Status status = running->perform(operation, time_to_wait(timeout));
    const auto is_in_output = [](const horoplug::TensorOutcome& result) { return !result.owned; };
    // A stream may have to wait for what runs on a GPU: see hp_stream_wait.
    if (status.ok() && instance->keeps_handle == 0 && operation->gpu.ordinal < 0 &&
        std::ranges::all_of(operation->outcomes, is_in_output)) {
      return HP_OK;
    }
    engine->engine.handles().keep(operation);
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
