// Random programs for the ranks of a job, which all end if every batch is negotiated.
#pragma once

#include <algorithm>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "harness/signatures.h"

namespace horoplug::testing {

using Random = std::mt19937_64;

inline int below(Random& random, int limit) {
  return std::uniform_int_distribution<int>(0, limit - 1)(random);
}
inline bool chance(Random& random, int of) { return below(random, of) == 0; }

// One action of a rank's program.
struct Action {
  enum class Kind { kSubmit, kWait, kJoin } kind;
  std::string name;
  Signature signature{};
};
using Program = std::vector<Action>;

inline const std::string kJoinName = "join";

// Programs that end under full negotiation. A step is a sequence of phases; in each phase a rank
// submits the same operations, either all at once in an order of its own, or one by one, waiting
// for each, in the order that all ranks who do so have.
inline std::vector<Program> random_programs(Random& random, int ranks, int steps) {
  std::vector<Program> programs(static_cast<std::size_t>(ranks));
  std::vector<std::vector<int>> phases(static_cast<std::size_t>(1 + below(random, 3)));
  int names = 0;
  for (auto& phase : phases) {
    for (int i = 1 + below(random, 4); i > 0; --i) phase.push_back(names++);
  }
  const int disorder = 1 + below(random, 40);  // one step in `disorder` differs from the others
  const int strange = 1 + below(random, 60);
  std::vector<bool> blocks(static_cast<std::size_t>(ranks));
  for (std::size_t rank = 0; rank < blocks.size(); ++rank) blocks[rank] = chance(random, 2);
  std::int64_t elements = 10;
  const bool joins = chance(random, 3);
  std::vector<int> last_steps(static_cast<std::size_t>(ranks), steps);
  if (joins) {
    for (int& last : last_steps) last -= below(random, std::min(steps, 4));
  }
  for (int step = 0; step < steps; ++step) {
    if (chance(random, strange)) ++elements;
    const bool has_extra = chance(random, strange);
    for (const auto& phase : phases) {
      for (int rank = 0; rank < ranks; ++rank) {
        const auto me = static_cast<std::size_t>(rank);
        if (step >= last_steps[me]) continue;
        std::vector<std::string> list;
        for (const int n : phase) list.push_back("t" + std::to_string(n));
        if (has_extra) list.push_back("extra" + std::to_string(step));
        const bool blocking = blocks[me] != chance(random, disorder);
        if (!blocking && chance(random, disorder)) std::shuffle(list.begin(), list.end(), random);
        Program& program = programs[me];
        for (const auto& name : list) {
          program.push_back({Action::Kind::kSubmit, name, sum_of(elements)});
          if (blocking) program.push_back({Action::Kind::kWait, name});
        }
        if (!blocking && chance(random, 2)) std::shuffle(list.begin(), list.end(), random);
        for (const auto& name : list) {
          if (!blocking) program.push_back({Action::Kind::kWait, name});
        }
      }
      if (has_extra) break;
    }
  }
  for (auto& program : programs) {
    if (!joins) break;
    program.push_back({Action::Kind::kJoin, kJoinName});
    program.push_back({Action::Kind::kWait, kJoinName});
  }
  return programs;
}

inline Program repeat(int steps, const std::function<void(Program&)>& step) {
  Program program;
  for (int i = 0; i < steps; ++i) step(program);
  return program;
}

inline void submit_all_then_wait(Program& program, const std::vector<std::string>& names) {
  for (const auto& name : names) program.push_back({Action::Kind::kSubmit, name, sum_of(4)});
  for (const auto& name : names) program.push_back({Action::Kind::kWait, name});
}

}  // namespace horoplug::testing
