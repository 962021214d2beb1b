// How the step of a plan is divided into batches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "collectives/tuning.h"

namespace horoplug {

// The number of plans that the ranks of a process set remember, by place.
inline constexpr std::size_t kRememberedPlans = 4;

using PlanContents = std::vector<std::vector<std::uint32_t>>;  // slots of the step, by batch

struct PlanChoice {
  Tuning tuning;
  PlanContents batches;
  bool operator==(const PlanChoice&) const = default;
};

}  // namespace horoplug
