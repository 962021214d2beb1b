// The end of an engine behind the C ABI: its resources go at once, its operations' results stay.
#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <filesystem>
#include <iterator>
#include <thread>
#include <vector>

#include "horoplug/horoplug.h"

namespace {

std::ptrdiff_t descriptors() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
}

hp_engine* start() {
  hp_config config{};
  config.struct_size = sizeof config;
  config.size = 1;
  config.segment_fd = config.doorbell_fd = -1;
  hp_engine* engine = nullptr;
  REQUIRE(hp_engine_create(&config, &engine) == HP_OK);
  return engine;
}

hp_status allgather(hp_engine* engine, const std::array<float, 4>& data, hp_handle* handle) {
  const std::array<std::int64_t, 1> shape{4};
  hp_tensor tensor{};
  tensor.input = data.data();
  tensor.shape = shape.data();
  tensor.ndim = 1;
  hp_submission submission{};
  submission.struct_size = sizeof submission;
  submission.op = HP_ALLGATHER;
  submission.dtype = HP_FLOAT32;
  submission.device = -1;
  submission.tensors = &tensor;
  submission.tensor_count = 1;
  return hp_submit(engine, &submission, handle);
}

}  // namespace

TEST_CASE("shutting down closes everything, and operations keep their results") {
  const auto before = descriptors();
  hp_engine* const engine = start();
  CHECK(descriptors() > before);
  const std::array<float, 4> data{1, 2, 3, 4};
  hp_handle handle = 0;
  REQUIRE(allgather(engine, data, &handle) == HP_OK);
  REQUIRE(hp_wait(engine, handle, 60) == HP_OK);
  CHECK(hp_engine_shutdown(engine) == HP_OK);
  CHECK(hp_engine_shutdown(engine) == HP_OK);
  CHECK(descriptors() == before);

  CHECK(hp_poll(engine, handle) == HP_OK);
  CHECK(hp_wait(engine, handle, -1) == HP_OK);
  hp_tensor_result result{};
  result.struct_size = sizeof result;
  REQUIRE(hp_result(engine, handle, 0, &result) == HP_OK);
  CHECK(static_cast<const float*>(result.data)[3] == 4);
  CHECK(hp_release(engine, handle) == HP_OK);
  hp_stats stats{};
  stats.struct_size = sizeof stats;
  CHECK(hp_get_stats(engine, &stats) == HP_OK);
  CHECK(stats.tensors == 1);

  CHECK(allgather(engine, data, &handle) == HP_SHUT_DOWN);
  CHECK(hp_join(engine, 0, &handle) == HP_SHUT_DOWN);
  CHECK(hp_buffer_create(engine, 100, &handle) == HP_SHUT_DOWN);
  CHECK(hp_timeline_stop(engine) == HP_OK);
  CHECK(hp_engine_abort(engine, "too late") == HP_OK);
  hp_engine_destroy(engine);
}

TEST_CASE("threads use an engine while it shuts down") {
  for (int round = 0; round < 20; ++round) {
    hp_engine* const engine = start();
    std::atomic<int> ready{0};
    std::vector<std::thread> threads;
    for (int number = 0; number < 3; ++number) {
      threads.emplace_back([&] {
        const std::array<float, 4> data{1, 2, 3, 4};
        hp_status status = HP_OK;
        ++ready;
        while (status == HP_OK) {
          hp_handle handle = 0;
          status = allgather(engine, data, &handle);
          if (status != HP_OK) break;
          status = hp_wait(engine, handle, -1);
          CHECK(hp_release(engine, handle) == HP_OK);
        }
        CHECK(status == HP_SHUT_DOWN);
      });
    }
    while (ready < 3) std::this_thread::yield();
    std::thread second([&] { CHECK(hp_engine_shutdown(engine) == HP_OK); });
    CHECK(hp_engine_shutdown(engine) == HP_OK);
    second.join();
    for (std::thread& thread : threads) thread.join();
    hp_engine_destroy(engine);
  }
}
