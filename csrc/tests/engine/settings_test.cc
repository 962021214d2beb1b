// The settings: defaults, ranges, callers of other versions, and the comparison between ranks.
#include "engine/settings.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <limits>
#include <string>

#include "base/status.h"
#include "engine/engine.h"

using namespace horoplug;

namespace {

hp_settings defaults(std::size_t bytes = sizeof(hp_settings)) {
  hp_settings settings{};
  settings.struct_size = bytes;
  hp_settings_init(&settings);
  return settings;
}

hp_status create(const hp_settings* settings) {
  hp_config config{};
  config.struct_size = sizeof config;
  config.size = 1;
  config.segment_fd = config.doorbell_fd = -1;
  config.settings = settings;
  hp_engine* engine = nullptr;
  const hp_status status = hp_engine_create(&config, &engine);
  if (status == HP_OK) hp_engine_destroy(engine);
  return status;
}

std::string refusal(const hp_settings& settings) {
  const hp_status status = create(&settings);
  CHECK(status == HP_INVALID_ARGUMENT);
  return hp_last_error();
}

}  // namespace

TEST_CASE("settings have no padding in which a new field of a later version could lie") {
  std::size_t rows = 0;
#define HP_SETTING(kind, name, ...) ++rows;
#include "horoplug/settings.def"
  CHECK(sizeof(hp_settings) == 8 * (1 + rows));
}

TEST_CASE("the defaults of the C ABI are allowed, and are those of the engine") {
  const hp_settings given = defaults();
  CHECK(given.struct_size == sizeof given);
  CHECK(given.plan_after == 3);
  CHECK(given.progress_cpu == -1);
  CHECK(given.autotune == HP_UNSET);
  CHECK(given.algorithm == nullptr);
  const Settings read = read_settings(given);
  const Settings made;
#define HP_SETTING(kind, name, ...) CHECK(read.name == made.name);
#include "horoplug/settings.def"
  CHECK(create(nullptr) == HP_OK);
  CHECK(create(&given) == HP_OK);
}

TEST_CASE("0 turns a setting off, and the time limit 0 means never") {
  hp_settings given = defaults();
  given.fusion_threshold = given.cache_capacity = given.plan_after = 0;
  given.autotune = 0;
  given.data_timeout = given.operation_timeout = given.deadlock_time = 0;
  const Settings read = read_settings(given);
  CHECK(read.fusion_threshold == 0);
  CHECK(read.cache_capacity == 0);
  CHECK(read.plan_after == 0);
  CHECK(read.autotune == false);
  for (const TimeLimit& limit :
       {read.data_timeout, read.operation_timeout, read.deadlock_time, read.stall_shutdown_time}) {
    CHECK(limit.get() == kForever);
  }
  CHECK(read.stall_check_time == Seconds(60));
}

TEST_CASE("a value out of its range is refused with one line that names the range") {
  hp_settings given = defaults();
  given.plan_after = 70000;
  CHECK(refusal(given) == "plan_after is 70000; it must be from 0 to 65536 steps");
  given = defaults();
  given.data_timeout = -1;
  CHECK(refusal(given).starts_with("data_timeout is -1; it must be from 0 to"));
  given.data_timeout = std::numeric_limits<double>::quiet_NaN();
  CHECK(refusal(given).starts_with("data_timeout is nan; it must be from 0 to"));
  given = defaults();
  given.algorithm = "guess";
  CHECK(refusal(given).starts_with("unknown algorithm 'guess'; there are "));
}

TEST_CASE("fields that an older caller does not have get their defaults") {
  hp_settings given = defaults();
  given.fusion_threshold = 17;
  given.plan_after = 70000;  // beyond the end of the caller's struct
  given.struct_size = offsetof(hp_settings, plan_after);
  CHECK(create(&given) == HP_OK);
  given.fusion_threshold = -17;
  CHECK(refusal(given).starts_with("fusion_threshold is -17"));
  // The library writes nothing behind the end of an older caller's struct.
  given.struct_size = offsetof(hp_settings, plan_after);
  hp_settings_init(&given);
  CHECK(given.struct_size == offsetof(hp_settings, plan_after));
  CHECK(given.fusion_threshold == 128 << 20);
  CHECK(given.plan_after == 70000);
}

TEST_CASE("the rows of the table say which settings ranks compare") {
  Settings settings;
  settings.fusion_threshold = 17;
  const auto list = compared_settings(settings);
  const auto has = [&](const char* name, const char* value) {
    return std::count(list.begin(), list.end(), std::pair<std::string, std::string>(name, value));
  };
  CHECK(has("fusion threshold (HOROPLUG_FUSION_THRESHOLD)", "17") == 1);
  CHECK(has("algorithm (HOROPLUG_ALGORITHM)", "not set") == 1);
  CHECK(has("autotune (HOROPLUG_AUTOTUNE)", "not set") == 1);
  CHECK(list.size() == 8);
}
