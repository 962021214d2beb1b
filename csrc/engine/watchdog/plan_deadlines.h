// Ends plans that stand still, so that negotiation can find out what some ranks have not submitted.
// Used by the thread that runs the loop.
#pragma once

#include "engine/operations/handle_table.h"
#include "engine/operations/submission_queue.h"
#include "engine/options.h"
#include "engine/process_set_registry.h"

namespace horoplug {

class PlanDeadlines {
 public:
  PlanDeadlines(const EngineOptions& options, const ProcessSetRegistry& registry,
                const HandleTable& handles, const SubmissionQueue& submissions)
      : options_(options), registry_(registry), handles_(handles), submissions_(submissions) {}

  void check(RunningTime now);
  // How long the plan of a set may stand still after the last event; kForever if it does not.
  Seconds patience(const ProcessSet& set, SteadyTime now) const;

 private:
  const EngineOptions& options_;
  const ProcessSetRegistry& registry_;
  const HandleTable& handles_;
  const SubmissionQueue& submissions_;
};

}  // namespace horoplug
