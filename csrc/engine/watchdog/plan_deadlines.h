// Ends plans that stand still, so that negotiation can find out what some ranks have not submitted.
// Used by the thread that runs the loop.
#pragma once

#include "engine/operations/handle_table.h"
#include "engine/options.h"
#include "engine/process_set_registry.h"

namespace horoplug {

class PlanDeadlines {
 public:
  PlanDeadlines(const EngineOptions& options, const ProcessSetRegistry& registry,
                const HandleTable& handles)
      : options_(options), registry_(registry), handles_(handles) {}

  void check(double now);
  // How long the plan of a set may stand still after the last event; kNever if it does not.
  double patience(const ProcessSet& set, double now) const;

 private:
  const EngineOptions& options_;
  const ProcessSetRegistry& registry_;
  const HandleTable& handles_;
};

}  // namespace horoplug
