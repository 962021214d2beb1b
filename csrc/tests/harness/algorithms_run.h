// Forces an algorithm on an engine, and tells which algorithms an engine has run.
//
// A forced algorithm that cannot run is replaced by another one without a word, as users expect. A
// test that forces one therefore says which algorithm it means by a row of the registry, and checks
// that it ran.
#pragma once

#include <set>
#include <string>

#include "collectives/collective.h"
#include "harness/cluster.h"

namespace horoplug::testing {

// Options that force an algorithm. Throws std::invalid_argument if the registry has none of this
// name.
EngineOptions options_forcing(const std::string& algorithm);

// Records the algorithms that one engine runs from now on.
class AlgorithmsRun {
 public:
  explicit AlgorithmsRun(Engine& engine);
  ~AlgorithmsRun();
  AlgorithmsRun(const AlgorithmsRun&) = delete;
  AlgorithmsRun& operator=(const AlgorithmsRun&) = delete;

  // Ends the recording. "STREAM_ALLREDUCE ring": the medium, the operation and the algorithm.
  std::set<std::string> take();
  // How take() describes a row of the registry.
  static std::string describe(const Algorithm& algorithm);

 private:
  Engine& engine_;
  std::string folder_;
};

}  // namespace horoplug::testing
