// The C ABI over the engine: translates structs and exceptions, and nothing else.
#include <cstdio>
#include <cstring>
#include <new>

#include "collectives/collective.h"
#include "device/cpu/kernels.h"
#include "engine/engine.h"
#include "engine/submission.h"
#include "horoplug/horoplug.h"
#include "transport/mpi/funnel.h"
#include "transport/tcp/socket_stream.h"

using horoplug::Engine;
using horoplug::EngineConfig;
using horoplug::Error;
using horoplug::Fd;
using horoplug::Member;
using horoplug::Status;

struct hp_engine {
  explicit hp_engine(EngineConfig config) : engine(std::move(config)) {}
  Engine engine;
};

struct hp_worker {
  std::shared_ptr<horoplug::Worker> thread = std::make_shared<horoplug::Worker>();
};

struct hp_buffer {
  std::shared_ptr<horoplug::SharedBuffer> buffer;
};

struct hp_device_memory {
  horoplug::Allocation memory;
};

namespace {

thread_local std::string last_error;

hp_status report(hp_status code, const std::string& text) {
  last_error = text;
  return code;
}

hp_status report(const Status& status) { return report(status.code, status.message); }

// Runs `body` and turns what it throws into a status.
template <typename Body>
hp_status guarded(Body&& body) noexcept {
  try {
    return body();
  } catch (const Error& error) {
    return report(error.status());
  } catch (const std::bad_alloc&) {
    return report(HP_INTERNAL, "out of memory");
  } catch (const std::exception& error) {
    return report(HP_INTERNAL, error.what());
  }
}

// A caller's struct, brought to the size that this library knows: what an older caller does not
// have is zero.
template <typename Struct>
Struct complete(const Struct* given) {
  Struct full{};
  if (given == nullptr || given->struct_size < sizeof(std::uint64_t)) {
    throw Error(HP_INVALID_ARGUMENT, "a struct without struct_size");
  }
  std::memcpy(&full, given, std::min<std::size_t>(given->struct_size, sizeof full));
  full.struct_size = sizeof full;
  return full;
}

// Fills a caller's struct as far as the caller knows it.
template <typename Struct>
void hand_over(const Struct& full, Struct* out) {
  const std::uint64_t size = std::min<std::uint64_t>(out->struct_size, sizeof full);
  std::memcpy(out, &full, size);
  out->struct_size = size;
}

std::uint32_t checked_set(int32_t number) {
  if (number < 0) {
    throw Error(HP_INVALID_ARGUMENT, "process set " + std::to_string(number) + " does not exist");
  }
  return static_cast<std::uint32_t>(number);
}

// Zero stands for the default; negative for never, which is the same inside.
template <typename T>
void set_unless_zero(T& option, T value) {
  if (value != 0) option = value;
}

void log_to_stderr(horoplug::LogLevel, const std::string& text) {
  std::fprintf(stderr, "horoplug: %s\n", text.c_str());
}

horoplug::Log make_log(const hp_config& config) {
  const auto level = config.log_level == 0 ? horoplug::LogLevel::kWarning
                                           : static_cast<horoplug::LogLevel>(config.log_level);
  if (config.log == nullptr) return {level, log_to_stderr};
  return {level, [log = config.log, user = config.log_user](horoplug::LogLevel at,
                                                            const std::string& text) {
            log(user, static_cast<int32_t>(at), text.c_str());
          }};
}

std::shared_ptr<horoplug::Doorbell> make_doorbell(int fd) {
  return fd >= 0 ? std::make_shared<horoplug::Doorbell>(Fd(fd))
                 : std::make_shared<horoplug::Doorbell>();
}

std::shared_ptr<horoplug::Mpi> make_mpi(const hp_mpi& given) {
  auto mpi = horoplug::make_mpi(given);
  return given.worker == nullptr ? mpi : horoplug::make_funnel(mpi, given.worker->thread);
}

EngineConfig make_config(const hp_config& given, std::vector<hp_peer> peers) {
  EngineConfig config;
  // Own every descriptor before anything can fail.
  std::vector<Member> taken;
  for (const hp_peer& peer : peers) {
    Member member;
    member.host = peer.host;
    Fd stream(peer.stream_fd);
    member.segment_file = Fd(peer.segment_fd);
    member.doorbell = make_doorbell(peer.doorbell_fd);
    if (stream) member.stream = std::make_unique<horoplug::SocketStream>(std::move(stream));
    for (int32_t i = 0; i < peer.lane_count; ++i) {
      member.lanes.push_back(std::make_unique<horoplug::SocketStream>(Fd(peer.lane_fds[i])));
    }
    taken.push_back(std::move(member));
  }
  Member self;
  self.host = given.host;
  self.segment_file = Fd(given.segment_fd);
  self.doorbell = make_doorbell(given.doorbell_fd);

  if (given.size < 1 || given.rank < 0 || given.rank >= given.size ||
      given.peer_count != given.size - 1) {
    throw Error(HP_INVALID_ARGUMENT, "rank, size and peers do not fit together");
  }
  config.rank = given.rank;
  config.members.resize(static_cast<std::size_t>(given.size));
  std::vector<bool> seen(config.members.size(), false);
  seen[static_cast<std::size_t>(given.rank)] = true;
  for (std::size_t i = 0; i < peers.size(); ++i) {
    const std::int32_t rank = peers[i].rank;
    if (rank < 0 || rank >= given.size || seen[static_cast<std::size_t>(rank)]) {
      throw Error(HP_INVALID_ARGUMENT, "rank " + std::to_string(rank) + " is no peer of rank " +
                                           std::to_string(given.rank) + " or is given twice");
    }
    seen[static_cast<std::size_t>(rank)] = true;
    config.members[static_cast<std::size_t>(rank)] = std::move(taken[i]);
  }
  config.members[static_cast<std::size_t>(given.rank)] = std::move(self);

  auto& options = config.options;
  set_unless_zero(options.fusion_threshold, given.fusion_threshold);
  if (options.fusion_threshold < 0) options.fusion_threshold = 0;
  options.fuse_groups = given.separate_groups == 0;
  if (given.process_sets != nullptr) options.process_sets = given.process_sets;
  if (given.cache_capacity != 0) {
    options.cache_capacity =
        given.cache_capacity < 0 ? 0 : static_cast<std::size_t>(given.cache_capacity);
  }
  if (given.plan_after != 0) options.plan_after = std::max(given.plan_after, 0);
  set_unless_zero(options.tuning.bucket_bytes, given.bucket_bytes);
  if (given.autotune != 0) {
    options.tuner.mode = given.autotune < 0 ? horoplug::Autotune::kOff : horoplug::Autotune::kAll;
  }
  options.tuner.fixed = given.autotune_fixed;
  set_unless_zero(options.tuner.warmup, given.autotune_warmup);
  set_unless_zero(options.tuner.turns, given.autotune_steps);
  set_unless_zero(options.tuner.choices, given.autotune_samples);
  if (given.autotune_log != nullptr) options.autotune_log = given.autotune_log;
  set_unless_zero(options.stall_check_time, given.stall_check_time);
  set_unless_zero(options.stall_shutdown_time, given.stall_shutdown_time);
  set_unless_zero(options.data_timeout, given.data_timeout);
  set_unless_zero(options.operation_timeout, given.operation_timeout);
  set_unless_zero(options.deadlock_time, given.deadlock_time);
  options.progress_cpu = given.progress_cpu - 1;
  if (given.link_latency > 0 && given.link_bandwidth > 0) {
    options.costs.stream = {given.link_latency * 1e6, 1e6 / given.link_bandwidth};
  }
  if (given.mpi != nullptr) {
    const hp_mpi mpi = complete(given.mpi);
    config.mpi = make_mpi(mpi);
    for (std::size_t i = 0; i < options.costs.mpi.size(); ++i) {
      if (mpi.latencies[i] <= 0) continue;
      options.costs.mpi[i] = {mpi.latencies[i] * 1e6, mpi.byte_times[i] * 1e6};
    }
  }
  options.local_rank = given.local_rank;
  std::vector<std::string> files(given.gpu_files, given.gpu_files + given.gpu_file_count);
  config.toolkit = [files = std::move(files)] {
    return horoplug::cuda::open_toolkit({files, true});
  };
  if (given.algorithm != nullptr) options.algorithm = given.algorithm;
  if (given.gpu_algorithm != nullptr) options.gpu_algorithm = given.gpu_algorithm;
  config.log = make_log(given);
  return config;
}

horoplug::Allocation& allocation_of(Engine& engine, hp_handle handle, int32_t index,
                                    bool on_device) {
  const auto operation = engine.handles().done(handle);
  const bool exists = index >= 0 && static_cast<std::size_t>(index) < operation->outcomes.size();
  auto* const owned =
      exists ? &operation->outcomes[static_cast<std::size_t>(index)].owned : nullptr;
  if (owned == nullptr || !*owned || (owned->get_deleter().device != nullptr) != on_device) {
    throw Error(HP_INVALID_ARGUMENT, "there is no allocation to take");
  }
  return *owned;
}

void check_algorithm(const std::string& name) {
  if (name.empty()) return;
  std::string known;
  for (const auto& algorithm : horoplug::algorithms()) {
    if (name == algorithm.name) return;
    if (known.find(algorithm.name) == std::string::npos) {
      known += (known.empty() ? "" : ", ") + std::string(algorithm.name);
    }
  }
  throw Error(HP_INVALID_ARGUMENT, "unknown algorithm '" + name + "'; there are " + known);
}

}  // namespace

extern "C" {

int32_t hp_abi_version(void) { return HP_ABI_VERSION; }

const char* hp_version(void) { return HOROPLUG_VERSION; }

const char* hp_last_error(void) { return last_error.c_str(); }

size_t hp_dtype_size(int32_t dtype) {
  return dtype < 0 || dtype >= HP_DTYPE_COUNT
             ? 0
             : horoplug::dtype_size(static_cast<horoplug::DType>(dtype));
}

const char* hp_dtype_name(int32_t dtype) {
  return dtype < 0 || dtype >= HP_DTYPE_COUNT
             ? "unknown"
             : horoplug::dtype_name(static_cast<horoplug::DType>(dtype));
}

const char* hp_cpu_kernels(void) { return horoplug::kernels().name; }

const char* hp_algorithms(void) {
  static const std::string* const text = [] {
    auto* lines = new std::string;
    for (const auto& algorithm : horoplug::algorithms()) {
      *lines += std::string(horoplug::op_kind_name(algorithm.kind)) + " " + algorithm.name + " " +
                algorithm.medium + "\n";
    }
    return lines;
  }();
  return text->c_str();
}

hp_status hp_worker_start(hp_worker** worker) {
  return guarded([&] {
    *worker = new hp_worker;
    return HP_OK;
  });
}

hp_status hp_worker_post(hp_worker* worker, void (*function)(void* context), void* context) {
  return guarded([&] {
    worker->thread->post([=] { function(context); });
    return HP_OK;
  });
}

void hp_worker_free(hp_worker* worker) { delete worker; }

hp_status hp_engine_create(const hp_config* config, hp_engine** engine) {
  return guarded([&] {
    const hp_config full = complete(config);
    std::vector<hp_peer> peers;
    const auto* at = reinterpret_cast<const char*>(full.peers);
    for (int32_t i = 0; i < full.peer_count; ++i) {
      peers.push_back(complete(reinterpret_cast<const hp_peer*>(at)));
      at += reinterpret_cast<const hp_peer*>(at)->struct_size;
    }
    EngineConfig made = make_config(full, std::move(peers));
    check_algorithm(made.options.algorithm);
    check_algorithm(made.options.gpu_algorithm);
    auto created = std::unique_ptr<hp_engine>(new hp_engine(std::move(made)));
    created->engine.wait_until_ready();
    *engine = created.release();
    return HP_OK;
  });
}

hp_status hp_engine_shutdown(hp_engine* engine) {
  return guarded([&] {
    engine->engine.shutdown();
    return HP_OK;
  });
}

void hp_engine_destroy(hp_engine* engine) { delete engine; }

hp_status hp_engine_abort(hp_engine* engine, const char* reason) {
  return guarded([&] {
    engine->engine.abort(reason != nullptr ? reason : "no reason given");
    return HP_OK;
  });
}

hp_status hp_submit(hp_engine* engine, const hp_submission* submission, hp_handle* handle) {
  return guarded([&] {
    const hp_submission full = complete(submission);
    const auto members = engine->engine.members(checked_set(full.process_set));
    *handle = engine->engine.submit(horoplug::make_operation(full, members));
    return HP_OK;
  });
}

hp_status hp_submit_many(hp_engine* engine, const hp_submission* submissions, int32_t count,
                         hp_handle* handles, int32_t* accepted) {
  *accepted = 0;
  return guarded([&] {
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
        if (!members || members->set != set) members = engine->engine.members(set);
        operations.push_back(horoplug::make_operation(full, members));
      }
    } catch (const Error& error) {
      refused = error.status();
    }
    const Status late = engine->engine.submit_all(operations);
    for (const auto& operation : operations) {
      if (operation->handle == 0) break;
      handles[(*accepted)++] = operation->handle;
    }
    return report(late.ok() ? refused : late);
  });
}

hp_status hp_process_set_add(hp_engine* engine, const int32_t* ranks, int32_t count,
                             hp_handle* handle) {
  return guarded([&] {
    *handle = engine->engine.add_set(std::vector<int>(ranks, ranks + std::max(count, 0)));
    return HP_OK;
  });
}

hp_status hp_process_set_remove(hp_engine* engine, int32_t process_set, hp_handle* handle) {
  return guarded([&] {
    *handle = engine->engine.remove_set(checked_set(process_set));
    return HP_OK;
  });
}

hp_status hp_join(hp_engine* engine, int32_t process_set, hp_handle* handle) {
  return guarded([&] {
    *handle = engine->engine.join(checked_set(process_set));
    return HP_OK;
  });
}

hp_status hp_buffer_create(hp_engine* engine, uint64_t bytes, hp_handle* handle) {
  return guarded([&] {
    *handle = engine->engine.create_buffer(bytes);
    return HP_OK;
  });
}

hp_status hp_buffer_take(hp_engine* engine, hp_handle handle, hp_buffer** buffer) {
  return guarded([&] {
    const auto operation = engine->engine.handles().done(handle);
    if (!operation->status.ok()) return report(operation->status);
    if (operation->signature.op != horoplug::OpKind::kAddBuffer || !operation->buffer) {
      throw Error(HP_INVALID_ARGUMENT, "the operation has no buffer to give");
    }
    *buffer = new hp_buffer{std::move(operation->buffer)};
    return HP_OK;
  });
}

void* hp_buffer_data(const hp_buffer* buffer) { return buffer->buffer->data(); }

uint64_t hp_buffer_size(const hp_buffer* buffer) { return buffer->buffer->bytes(); }

void hp_buffer_free(hp_buffer* buffer) { delete buffer; }

hp_status hp_value(hp_engine* engine, hp_handle handle, int64_t* value) {
  return guarded([&] {
    const auto operation = engine->engine.handles().done(handle);
    if (!operation->status.ok()) return report(operation->status);
    *value = operation->value;
    return HP_OK;
  });
}

hp_status hp_poll(hp_engine* engine, hp_handle handle) {
  return guarded([&] { return report(engine->engine.poll(handle)); });
}

hp_status hp_on_done(hp_engine* engine, hp_handle handle, hp_done done, void* context) {
  return guarded([&] {
    engine->engine.on_done(handle, done, context);
    return HP_OK;
  });
}

hp_status hp_process_set_size(hp_engine* engine, int32_t process_set, int32_t* size,
                              int32_t* place) {
  return guarded([&] {
    const auto members = engine->engine.any_members(checked_set(process_set));
    if (size != nullptr) *size = members->size();
    if (place != nullptr) *place = members->index;
    return HP_OK;
  });
}

hp_status hp_wait(hp_engine* engine, hp_handle handle, double timeout) {
  return guarded([&] { return report(engine->engine.wait(handle, timeout)); });
}

hp_status hp_perform(hp_engine* engine, const hp_submission* submission, double timeout,
                     hp_handle* handle) {
  *handle = 0;
  return guarded([&] {
    const hp_submission full = complete(submission);
    const auto members = engine->engine.members(checked_set(full.process_set));
    const auto operation = horoplug::make_operation(full, members);
    const Status status = engine->engine.perform(operation, timeout);
    *handle = operation->handle;
    return report(status);
  });
}

hp_status hp_result(hp_engine* engine, hp_handle handle, int32_t index, hp_tensor_result* result) {
  return guarded([&] {
    const auto operation = engine->engine.handles().done(handle);
    if (!operation->status.ok()) return report(operation->status);
    const auto& outcome = operation->outcome(index);
    hp_tensor_result full{};
    full.data = outcome.data;
    full.bytes = outcome.bytes;
    full.rows = outcome.rows;
    full.row_counts = outcome.row_counts.empty() ? nullptr : outcome.row_counts.data();
    full.row_count_size = static_cast<int32_t>(outcome.row_counts.size());
    full.owned = outcome.owned ? 1 : 0;
    full.device = operation->gpu.device ? operation->gpu.device->ordinal() : -1;
    hand_over(full, result);
    return HP_OK;
  });
}

hp_status hp_take(hp_engine* engine, hp_handle handle, int32_t index, void** data) {
  return guarded([&] {
    *data = allocation_of(engine->engine, handle, index, false).release();
    return HP_OK;
  });
}

hp_status hp_take_device(hp_engine* engine, hp_handle handle, int32_t index, void* stream,
                         hp_device_memory** memory) {
  return guarded([&] {
    auto taken = std::make_unique<hp_device_memory>(
        std::move(allocation_of(engine->engine, handle, index, true)));
    taken->memory.get_deleter().stream = static_cast<CUstream>(stream);
    *memory = taken.release();
    return HP_OK;
  });
}

hp_status hp_device_allocate(hp_engine* engine, int32_t device, uint64_t bytes, void* stream,
                             hp_device_memory** memory) {
  return guarded([&] {
    if (device < 0) throw Error(HP_INVALID_ARGUMENT, "memory of the CPU is not allocated here");
    const auto owner = engine->engine.device(device);
    const auto used_by = static_cast<CUstream>(stream);
    void* const data = std::bit_cast<void*>(owner->allocate(bytes, used_by));
    *memory = new hp_device_memory{horoplug::Allocation(data, {owner, used_by})};
    return HP_OK;
  });
}

void* hp_device_memory_data(const hp_device_memory* memory) { return memory->memory.get(); }

void hp_device_memory_free(hp_device_memory* memory) { delete memory; }

hp_status hp_stream_wait(hp_engine* engine, hp_handle handle, void* stream) {
  return guarded([&] {
    engine->engine.make_stream_wait(handle, static_cast<CUstream>(stream));
    return HP_OK;
  });
}

hp_status hp_stream_copy(hp_engine* engine, hp_handle handle, int32_t index, void* to,
                         void* stream) {
  return guarded([&] {
    engine->engine.copy_result(handle, index, to, static_cast<CUstream>(stream));
    return HP_OK;
  });
}

void hp_free(void* data) { std::free(data); }

hp_status hp_release(hp_engine* engine, hp_handle handle) {
  return guarded([&] {
    engine->engine.handles().release(handle);
    return HP_OK;
  });
}

hp_status hp_get_stats(hp_engine* engine, hp_stats* stats) {
  return guarded([&] {
    hand_over(engine->engine.stats(), stats);
    return HP_OK;
  });
}

hp_status hp_timeline_start(hp_engine* engine, const char* path, int32_t mark_cycles) {
  return guarded([&] {
    engine->engine.tracing().start(path != nullptr ? path : "", mark_cycles != 0);
    return HP_OK;
  });
}

hp_status hp_timeline_stop(hp_engine* engine) {
  return guarded([&] {
    engine->engine.tracing().stop();
    return HP_OK;
  });
}

}  // extern "C"
