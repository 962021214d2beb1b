#include "harness/algorithms_run.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>

#include "harness/json.h"

namespace horoplug::testing {
namespace {

std::string upper(std::string text) {
  std::ranges::transform(text, text.begin(), [](unsigned char c) { return std::toupper(c); });
  return text;
}

}  // namespace

EngineOptions options_forcing(const std::string& algorithm) {
  const bool known = std::ranges::any_of(
      algorithms(), [&](const Algorithm& row) { return row.name == algorithm; });
  if (!known) throw std::invalid_argument("there is no algorithm " + algorithm);
  EngineOptions options = test_options();
  options.algorithm = algorithm;
  return options;
}

AlgorithmsRun::AlgorithmsRun(Engine& engine) : engine_(engine) {
  char name[] = "/tmp/horoplug-algorithms-XXXXXX";
  if (::mkdtemp(name) == nullptr) throw std::runtime_error("no temporary folder");
  folder_ = name;
  engine_.tracing().start(folder_ + "/timeline.json", false);
}

AlgorithmsRun::~AlgorithmsRun() {
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

std::set<std::string> AlgorithmsRun::take() {
  engine_.tracing().stop();
  std::ifstream file(folder_ + "/timeline.json");
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  std::set<std::string> names;
  const Json events = JsonParser::parse(text);
  for (const Json& event : events.items) {
    if (!event.has("args") || !event["args"].has("algorithm")) continue;
    names.insert(event["name"].text + " " + event["args"]["algorithm"].text);
  }
  return names;
}

std::string AlgorithmsRun::describe(const Algorithm& algorithm) {
  return upper(algorithm.medium) + "_" + upper(op_kind_name(algorithm.kind)) + " " + algorithm.name;
}

}  // namespace horoplug::testing
