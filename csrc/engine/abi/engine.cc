// The C ABI of engines and of the threads that MPI is called in.
#include <vector>

#include "engine/abi/abi.h"

using namespace horoplug::abi;

extern "C" {

hp_status hp_worker_start(hp_worker** worker) {
  return guarded([&] { *worker = new hp_worker; });
}

hp_status hp_worker_post(hp_worker* worker, void (*function)(void* context), void* context) {
  return guarded([&] { worker->thread->post([=] { function(context); }); });
}

void hp_worker_free(hp_worker* worker) { delete worker; }

hp_status hp_engine_create(const hp_config* config, hp_engine** engine) {
  return guarded([&] { *engine = new hp_engine(complete(config)); });
}

hp_status hp_engine_shutdown(hp_engine* engine) {
  return guarded([&] { engine->engine.shutdown(); });
}

void hp_engine_destroy(hp_engine* engine) { delete engine; }

hp_status hp_engine_abort(hp_engine* engine, const char* reason) {
  return guarded([&] {
    const auto running = engine->engine.lease();
    if (running) running->abort(reason != nullptr ? reason : "no reason given");
  });
}

hp_status hp_engine_set_limits(hp_engine* engine, double data_timeout, double operation_timeout) {
  return guarded([&] {
    const auto running = engine->engine.lease();
    if (running) {
      running->set_limits(horoplug::time_limit(data_timeout),
                          horoplug::time_limit(operation_timeout));
    }
  });
}

hp_status hp_engine_attach(hp_engine* engine, hp_engine* group, const char* name,
                           const int32_t* ranks, int32_t count) {
  return guarded([&] {
    const auto searching = engine->engine.use();
    const auto searched = group->engine.use();
    searching->attach(*searched.operator->(), name != nullptr ? name : "",
                      {ranks, ranks + std::max(count, 0)});
  });
}

hp_status hp_connection_add(hp_engine* engine, int32_t rank, const int32_t* fds, int32_t count,
                            const uint8_t* keys) {
  return guarded([&] {
    std::vector<horoplug::Fd> connections;
    for (int32_t i = 0; i < count; ++i) connections.emplace_back(fds[i]);
    auto streams = engine->streams.connect({rank, true, keys}, std::move(connections));
    const auto running = engine->engine.lease();
    if (running) running->add_connection(rank, std::move(streams));
  });
}

hp_status hp_connection_fail(hp_engine* engine, int32_t rank, const char* reason) {
  return guarded([&] {
    const auto running = engine->engine.lease();
    if (running) running->fail_connection(rank, reason != nullptr ? reason : "no reason given");
  });
}

hp_status hp_get_stats(hp_engine* engine, hp_stats* stats) {
  return guarded([&] { hand_over(engine->engine.stats(), stats); });
}

hp_status hp_timeline_start(hp_engine* engine, const char* path, int32_t mark_cycles) {
  return guarded([&] {
    engine->engine.use()->tracing().start(path != nullptr ? path : "", mark_cycles != 0);
  });
}

hp_status hp_timeline_stop(hp_engine* engine) {
  return guarded([&] {
    const auto running = engine->engine.lease();
    if (running) running->tracing().stop();
  });
}

}  // extern "C"
