// Asks all ranks what they do when an operation has been pending for long, and reports what is
// wrong: a stall, a deadlock, or an operation that has taken too long.
//
// It drives the state machine of controller/stalls/stall_inspection.h: it knows the time, this
// rank's operations and the links. Used by the thread that runs the loop.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "controller/stalls/stall_diagnosis.h"
#include "controller/stalls/stall_inspection.h"
#include "engine/counters.h"
#include "engine/operations/handle_table.h"
#include "engine/options.h"
#include "engine/peers.h"
#include "engine/point_to_point.h"
#include "engine/process_set_registry.h"
#include "engine/watchdog/liveness.h"
#include "transport/mesh.h"

namespace horoplug {

class StallInspector {
 public:
  StallInspector(const EngineConfig& config, Mesh& mesh, const ProcessSetRegistry& registry,
                 const PointToPoint& point_to_point, const HandleTable& handles, Liveness& liveness,
                 const Peers& peers, const Activity& activity);

  // Begins an inspection when one is due, and checks how long operations and answers take. Throws
  // Error(HP_TIMEOUT) if that is too long.
  void check(double now);
  // Answers the root, sends what there is to send and, on the root, judges a complete report.
  // Throws Error(HP_TIMEOUT) if an operation has taken too long.
  void run();

  // Messages. They throw WireError if the message cannot be right.
  void request() { requested_ = true; }
  void receive(int from, InspectionQuestion question) {
    asked_parent_at_ = 0;
    inspection_.receive(from, std::move(question));
  }
  void receive(int from, Report report) { inspection_.receive(from, std::move(report)); }

  bool running() const { return inspection_.running(); }
  // Seconds between two inspections while an operation waits.
  double interval() const;
  // This process has stood still for `seconds`, which are not held against the peers.
  void excuse(double seconds) {
    if (begun_at_ > 0) begun_at_ += seconds;
    if (asked_parent_at_ > 0) asked_parent_at_ += seconds;
  }

 private:
  double overdue_time() const;
  static double waiting_since(const ProcessSet& set, const Operation& operation);
  double oldest_wait(double now) const;
  RankReport report_of_this_rank(double now) const;
  void judge(const Report& report, double now);
  void call_off(const Diagnosis& diagnosis,
                const std::map<std::uint32_t, std::vector<int>>& members);
  void warn_of(const std::vector<Diagnosis::Stall>& stalls, double now);
  void warn_of_deadlock(const std::string& text, double now);
  void check_without_inspection(double now);
  void check_answers(double now);
  void check_parent(double now);

  const EngineConfig& config_;
  Mesh& mesh_;
  const ProcessSetRegistry& registry_;
  const PointToPoint& point_to_point_;
  const HandleTable& handles_;
  Liveness& liveness_;
  const Peers& peers_;
  const Activity& activity_;

  const TreePosition position_;
  StallInspection inspection_;
  bool requested_ = false;
  double next_at_ = 0;
  double begun_at_ = 0;  // 0: no inspection runs, or this rank is not the root
  // When the parent was asked for an inspection that has not come; 0: it does not owe one.
  double asked_parent_at_ = 0;
  double last_silence_warning_ = -1e9;
  double last_deadlock_warning_ = -kNever;
  std::map<std::pair<std::uint32_t, std::string>, double> warned_;  // when, by set and operation
};

}  // namespace horoplug
