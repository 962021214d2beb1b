// Operations that are prepared once and started often, behind the C ABI.
#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "horoplug/horoplug.h"

namespace {

struct OneRank {
  OneRank() {
    hp_config config{};
    config.struct_size = sizeof config;
    config.size = 1;
    config.segment_fd = config.doorbell_fd = -1;
    REQUIRE(hp_engine_create(&config, &engine) == HP_OK);
  }
  ~OneRank() { hp_engine_destroy(engine); }
  OneRank(const OneRank&) = delete;
  OneRank& operator=(const OneRank&) = delete;

  hp_engine* engine = nullptr;
};

// Operations on `count` vectors of two float32.
struct Submission {
  explicit Submission(const char* name, std::int32_t op = HP_ALLREDUCE, int count = 1)
      : tensors(count) {
    for (hp_tensor& tensor : tensors) tensor = {nullptr, nullptr, shape.data(), 1, 0};
    given.struct_size = sizeof given;
    given.op = op;
    given.dtype = HP_FLOAT32;
    given.reduce_op = HP_SUM;
    given.device = -1;
    given.name = name;
    given.tensors = tensors.data();
    given.tensor_count = count;
  }
  std::array<std::int64_t, 1> shape{2};
  std::vector<hp_tensor> tensors;
  hp_submission given{};
};

hp_instance instance_of(const hp_prepared* prepared, const void* const* inputs,
                        void* const* outputs) {
  hp_instance instance{};
  instance.struct_size = sizeof instance;
  instance.prepared = prepared;
  instance.inputs = inputs;
  instance.outputs = outputs;
  return instance;
}

}  // namespace

TEST_CASE("a prepared operation is started with the memory of each start") {
  const OneRank rank;
  hp_prepared* prepared = nullptr;
  {
    Submission submission("sum");
    submission.given.prescale = 3;
    REQUIRE(hp_prepare(rank.engine, &submission.given, &prepared) == HP_OK);
  }  // neither the submission nor its shape is needed any more
  for (int i = 0; i < 3; ++i) {
    std::array<float, 2> from{1.0F + static_cast<float>(i), 2}, to{};
    const void* const inputs[] = {from.data()};
    void* const outputs[] = {to.data()};
    hp_instance instance = instance_of(prepared, inputs, outputs);
    hp_handle handle = 1;
    if (i == 0) {
      std::int32_t accepted = 0;
      REQUIRE(hp_start(rank.engine, &instance, 1, &handle, &accepted) == HP_OK);
      CHECK(accepted == 1);
      CHECK(hp_wait(rank.engine, handle, 60) == HP_OK);
      CHECK(hp_release(rank.engine, handle) == HP_OK);
    } else {
      REQUIRE(hp_start_and_wait(rank.engine, &instance, 60, &handle) == HP_OK);
      CHECK(handle == 0);  // there is nothing to release
      instance.keeps_handle = 1;
      REQUIRE(hp_start_and_wait(rank.engine, &instance, 60, &handle) == HP_OK);
      CHECK(hp_poll(rank.engine, handle) == HP_OK);
      CHECK(hp_release(rank.engine, handle) == HP_OK);
    }
    CHECK(to == std::array<float, 2>{3 * from[0], 6});
  }
  hp_prepared_free(prepared);
}

TEST_CASE("results that the engine has allocated stay behind the handle of a start") {
  const OneRank rank;
  const Submission submission("gather", HP_ALLGATHER);
  hp_prepared* prepared = nullptr;
  REQUIRE(hp_prepare(rank.engine, &submission.given, &prepared) == HP_OK);
  const std::array<float, 2> from{1, 2};
  const void* const inputs[] = {from.data()};
  void* const outputs[] = {nullptr};
  const hp_instance instance = instance_of(prepared, inputs, outputs);
  hp_handle handle = 0;
  REQUIRE(hp_start_and_wait(rank.engine, &instance, 60, &handle) == HP_OK);
  REQUIRE(handle != 0);
  hp_tensor_result result{};
  result.struct_size = sizeof result;
  CHECK(hp_result(rank.engine, handle, 0, &result) == HP_OK);
  CHECK(static_cast<const float*>(result.data)[1] == 2);
  CHECK(hp_release(rank.engine, handle) == HP_OK);
  hp_prepared_free(prepared);
}

TEST_CASE("operations that take splits keep those with which they were prepared") {
  const OneRank rank;
  hp_prepared* prepared = nullptr;
  {
    Submission submission("exchange", HP_ALLTOALL);
    const std::array<std::int64_t, 1> splits{2};
    submission.given.splits = splits.data();
    submission.given.split_count = 1;
    REQUIRE(hp_prepare(rank.engine, &submission.given, &prepared) == HP_OK);
  }
  for (int i = 0; i < 2; ++i) {
    const std::array<float, 2> from{static_cast<float>(i), 2};
    std::array<float, 2> to{};
    const void* const inputs[] = {from.data()};
    void* const outputs[] = {to.data()};
    const hp_instance instance = instance_of(prepared, inputs, outputs);
    hp_handle handle = 1;
    CHECK(hp_start_and_wait(rank.engine, &instance, 60, &handle) == HP_OK);
    CHECK(handle == 0);  // the result has filled the output
    CHECK(to == from);
  }
  hp_prepared_free(prepared);
}

TEST_CASE("a start that does not end in time gives a handle, under which it goes on") {
  const OneRank rank;
  Submission receive("receive", HP_RECV), send("send", HP_SEND);
  hp_prepared* prepared = nullptr;
  REQUIRE(hp_prepare(rank.engine, &receive.given, &prepared) == HP_OK);
  std::array<float, 2> from{1, 2}, to{};
  const void* const inputs[] = {to.data()};
  void* const outputs[] = {to.data()};
  const hp_instance instance = instance_of(prepared, inputs, outputs);
  hp_handle handle = 0, sent = 0;
  CHECK(hp_start_and_wait(rank.engine, &instance, 0.01, &handle) == HP_IN_PROGRESS);
  REQUIRE(handle != 0);
  CHECK(hp_poll(rank.engine, handle) == HP_IN_PROGRESS);
  send.tensors[0].input = send.tensors[0].output = from.data();
  CHECK(hp_perform(rank.engine, &send.given, 60, &sent) == HP_OK);
  CHECK(hp_wait(rank.engine, handle, 60) == HP_OK);
  CHECK(to == from);
  CHECK(hp_release(rank.engine, handle) == HP_OK);
  CHECK(hp_poll(rank.engine, handle) == HP_INVALID_ARGUMENT);
  CHECK(hp_release(rank.engine, sent) == HP_OK);
  hp_prepared_free(prepared);
}

TEST_CASE("starts of several prepared operations end before the first one that is refused") {
  const OneRank rank;
  constexpr int kTensors = 11;  // more than fit on the stack
  const Submission group("group", HP_ALLREDUCE, kTensors), single("single");
  hp_prepared *of_group = nullptr, *of_single = nullptr;
  REQUIRE(hp_prepare(rank.engine, &group.given, &of_group) == HP_OK);
  REQUIRE(hp_prepare(rank.engine, &single.given, &of_single) == HP_OK);
  std::array<std::array<float, 2>, kTensors> memory{};
  std::array<void*, kTensors> outputs{};
  std::array<const void*, kTensors> inputs{};
  for (int i = 0; i < kTensors; ++i) {
    memory[i] = {static_cast<float>(i), 1};
    inputs[i] = outputs[i] = memory[i].data();
  }
  const void* const nothing[] = {nullptr};
  const std::array instances{
      instance_of(of_group, inputs.data(), outputs.data()),
      instance_of(of_single, nothing, outputs.data()),  // without memory to read
      instance_of(of_single, inputs.data(), outputs.data()),
  };
  std::array<hp_handle, 3> handles{};
  std::int32_t accepted = -1;
  CHECK(hp_start(rank.engine, instances.data(), 3, handles.data(), &accepted) ==
        HP_INVALID_ARGUMENT);
  CHECK(std::string(hp_last_error()).find("a tensor without memory") != std::string::npos);
  REQUIRE(accepted == 1);
  CHECK(hp_wait(rank.engine, handles[0], 60) == HP_OK);
  CHECK(memory[10] == std::array<float, 2>{10, 1});
  hp_prepared_free(of_group);
  hp_prepared_free(of_single);
}

TEST_CASE("what cannot be prepared or started is refused with a reason") {
  const OneRank rank;
  hp_prepared* prepared = nullptr;
  const auto refused = [&](hp_status status, const char* reason) {
    CHECK_MESSAGE(std::string(hp_last_error()).find(reason) != std::string::npos, hp_last_error());
    return status;
  };
  Submission splits("x", HP_ALLTOALL);
  const std::array<std::int64_t, 2> two{1, 1};
  splits.given.splits = two.data();
  splits.given.split_count = 2;
  CHECK(refused(hp_prepare(rank.engine, &splits.given, &prepared), "splits has 2 entries") ==
        HP_INVALID_ARGUMENT);
  Submission nowhere("x", HP_BROADCAST);
  nowhere.given.root = 7;
  CHECK(refused(hp_prepare(rank.engine, &nowhere.given, &prepared), "root rank 7") ==
        HP_INVALID_ARGUMENT);
  CHECK(prepared == nullptr);

  const Submission unnamed(nullptr);
  REQUIRE(hp_prepare(rank.engine, &unnamed.given, &prepared) == HP_OK);
  std::array<float, 2> memory{1, 2};
  const void* const inputs[] = {memory.data()};
  void* const outputs[] = {memory.data()};
  const hp_instance instance = instance_of(prepared, inputs, outputs);
  hp_handle handle = 0;
  CHECK(hp_start_and_wait(rank.engine, &instance, 60, &handle) == HP_OK);
  CHECK(hp_start_and_wait(rank.engine, &instance, 60, &handle) == HP_OK);  // under a new name
  const OneRank other;
  CHECK(refused(hp_start_and_wait(other.engine, &instance, 60, &handle), "another engine") ==
        HP_INVALID_ARGUMENT);
  CHECK(hp_engine_shutdown(rank.engine) == HP_OK);
  CHECK(refused(hp_start_and_wait(rank.engine, &instance, 60, &handle), "shut down") ==
        HP_SHUT_DOWN);
  hp_prepared_free(prepared);
}
