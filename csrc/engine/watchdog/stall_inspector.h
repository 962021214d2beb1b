// Asks all ranks what they do when an operation has been pending for long, and reports what is
// wrong: a stall, a deadlock, or an operation that has taken too long.
//
// It drives the state machine of controller/stalls/stall_inspection.h: it knows the time, this
// rank's operations and the links. Used by the thread that runs the loop.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/running_clock.h"
#include "base/time.h"
#include "controller/messages/messages.h"
#include "controller/stalls/stall_diagnosis.h"
#include "controller/stalls/stall_inspection.h"
#include "engine/counters.h"
#include "engine/operations/handle_table.h"
#include "engine/options.h"
#include "engine/peers.h"
#include "engine/point_to_point.h"
#include "engine/process_set_registry.h"
#include "engine/watchdog/attached_group.h"
#include "engine/watchdog/limits.h"
#include "engine/watchdog/suspicion.h"
#include "transport/mesh.h"

namespace horoplug {

class StallInspector {
 public:
  StallInspector(const EngineConfig& config, Mesh& mesh, const ProcessSetRegistry& registry,
                 const PointToPoint& point_to_point, const HandleTable& handles,
                 Suspicion& suspicion, const Peers& peers, const Activity& activity,
                 RunningClock& clock);
  ~StallInspector();

  // Any thread. From here on, the search for deadlocks takes in the operations of a group. An
  // engine of a group asks for a search, and learns of deadlocks, through the same object.
  void attach(std::shared_ptr<AttachedGroup> group);
  void join_search(std::shared_ptr<AttachedGroup> own);

  // Begins an inspection when one is due, and checks how long operations and answers take. Throws
  // Error(HP_TIMEOUT) if that is too long.
  void check(RunningTime now);
  // Answers the root, sends what there is to send and, on the root, judges a complete report.
  // Throws Error(HP_TIMEOUT) if an operation has taken too long.
  void run();

  // Messages. They throw WireError if the message cannot be right.
  //
  // A rank below asks for an inspection.
  void receive(const InspectionRequest& request) {
    if (request.for_groups) {
      requested_for_groups_ = true;
    } else {
      request_since(clock_.now() - request.age);
    }
  }
  void receive(const CallOff& call_off);
  void receive(int from, InspectionQuestion question) {
    asked_parent_at_.reset();
    heard_at_ = clock_.now();
    inspection_.receive(from, std::move(question));
  }
  void receive(int from, Report report) { inspection_.receive(from, std::move(report)); }

  bool running() const { return inspection_.running(); }
  // The time between two inspections while an operation waits.
  Seconds interval() const;

 private:
  Seconds overdue_time() const { return operation_limit(config_.options).time; }
  Seconds quiet_time() const;
  RunningTime silence_begins(RunningTime since, RunningTime now) const;
  static RunningTime waiting_since(const ProcessSet& set, const Operation& operation);
  std::optional<RunningTime> oldest_wait() const;
  RankReport report_of_this_rank();
  // An operation has been pending since `since`.
  void request_since(RunningTime since) {
    requested_ = true;
    requested_since_ = std::min(requested_since_.value_or(since), since);
  }
  void begin(RunningTime since, RunningTime now);
  std::vector<std::shared_ptr<AttachedGroup>> groups();
  std::shared_ptr<AttachedGroup> own_group();
  void add_group(const AttachedGroup& group, SteadyTime now, RankReport& report) const;
  bool is_pending(const OperationKey& key) const;
  void fail_set(std::uint32_t set, int root, const Status& status);
  void obey(const CallOff& call_off);
  void judge(const Report& report, RunningTime now);
  void call_off(const Diagnosis& diagnosis,
                const std::map<std::uint32_t, std::vector<int>>& members);
  void warn_of(const std::vector<Diagnosis::Stall>& stalls, RunningTime now);
  void warn_of_deadlock(const std::string& text, RunningTime now);
  void check_without_inspection(RunningTime now);
  void check_answers(RunningTime now);
  void check_parent(RunningTime now);
  [[noreturn]] static void fail_pending(const Suspicion::Finding& finding, const Limit& progress);

  const EngineConfig& config_;
  Mesh& mesh_;
  const ProcessSetRegistry& registry_;
  const PointToPoint& point_to_point_;
  const HandleTable& handles_;
  Suspicion& suspicion_;
  const Peers& peers_;
  const Activity& activity_;
  RunningClock& clock_;

  const TreePosition position_;
  StallInspection inspection_;
  bool requested_ = false;
  // The begin of the longest wait for which an inspection was requested since the last check: the
  // wait may be over later.
  std::optional<RunningTime> requested_since_;
  bool requested_for_groups_ = false;
  // The inspection is for other groups only: nobody owes this one an answer.
  bool is_for_groups_ = false;
  RunningTime next_at_;
  // The root: all ranks have answered; other ranks: an inspection has come.
  RunningTime heard_at_;
  // Since when ranks owe the root an answer, while an inspection runs.
  std::optional<RunningTime> begun_at_;
  // Since when the parent owes an inspection that it was asked for.
  std::optional<RunningTime> asked_parent_at_;
  std::optional<RunningTime> last_silence_warning_;
  std::optional<RunningTime> last_deadlock_warning_;
  std::map<std::pair<std::uint32_t, std::string>, RunningTime>
      warned_;  // when, by set and operation

  std::mutex groups_mutex_;
  std::vector<std::shared_ptr<AttachedGroup>> groups_;
  std::shared_ptr<AttachedGroup> own_group_;
  std::atomic<bool> has_groups_{false};  // or is one
};

}  // namespace horoplug
