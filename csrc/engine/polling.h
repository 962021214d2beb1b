// What can complete without an event that wakes the loop, and how often to look at it.
#pragma once

#include "engine/counters.h"
#include "engine/lifecycle.h"
#include "engine/point_to_point.h"
#include "engine/process_set_registry.h"
#include "transport/mesh.h"

namespace horoplug {

// Used by the thread that runs the loop.
class Polling {
 public:
  Polling(const Lifecycle& lifecycle, const ProcessSetRegistry& registry,
          const PointToPoint& point_to_point, const Mesh& mesh, const Activity& activity)
      : lifecycle_(lifecycle),
        registry_(registry),
        point_to_point_(point_to_point),
        mesh_(mesh),
        activity_(activity) {}

  bool needed() const;
  // Polling becomes rarer the longer a wait lasts: a completion is noticed late by a
  // small part of the time that it took.
  Seconds interval(SteadyTime now) const;

 private:
  const Lifecycle& lifecycle_;
  const ProcessSetRegistry& registry_;
  const PointToPoint& point_to_point_;
  const Mesh& mesh_;
  const Activity& activity_;
};

}  // namespace horoplug
