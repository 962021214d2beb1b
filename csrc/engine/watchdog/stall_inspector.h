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

#include "base/lost_time.h"
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
#include "engine/watchdog/liveness.h"
#include "transport/mesh.h"

namespace horoplug {

class StallInspector {
 public:
  StallInspector(const EngineConfig& config, Mesh& mesh, const ProcessSetRegistry& registry,
                 const PointToPoint& point_to_point, const HandleTable& handles, Liveness& liveness,
                 const Peers& peers, const Activity& activity);
  ~StallInspector();

  // Any thread. From here on, the search for deadlocks takes in the operations of a group. An
  // engine of a group asks for a search, and learns of deadlocks, through the same object.
  void attach(std::shared_ptr<AttachedGroup> group);
  void join_search(std::shared_ptr<AttachedGroup> own);

  // Begins an inspection when one is due, and checks how long operations and answers take. Throws
  // Error(HP_TIMEOUT) if that is too long.
  void check(SteadyTime now);
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
      request_since(steady_now() - request.age);
    }
  }
  void receive(const CallOff& call_off);
  void receive(int from, InspectionQuestion question) {
    asked_parent_at_.reset();
    heard_at_ = steady_now();
    inspection_.receive(from, std::move(question));
  }
  void receive(int from, Report report) { inspection_.receive(from, std::move(report)); }

  bool running() const { return inspection_.running(); }
  // The time between two inspections while an operation waits.
  Seconds interval() const;
  // Time that is not held against the peers.
  void excuse(const LostTime& lost) {
    if (begun_at_) lost.extend(*begun_at_);
    if (asked_parent_at_) lost.extend(*asked_parent_at_);
    lost.extend(requested_since_);
  }

 private:
  Seconds overdue_time() const { return operation_limit(config_.options).time; }
  Seconds quiet_time() const;
  SteadyTime silence_begins(SteadyTime since, SteadyTime now) const;
  static SteadyTime waiting_since(const ProcessSet& set, const Operation& operation);
  SteadyTime oldest_wait() const;
  RankReport report_of_this_rank(SteadyTime now);
  // An operation has been pending since `since`.
  void request_since(SteadyTime since) {
    requested_ = true;
    requested_since_ = std::min(requested_since_, since);
  }
  void begin(SteadyTime since, SteadyTime now);
  std::vector<std::shared_ptr<AttachedGroup>> groups();
  std::shared_ptr<AttachedGroup> own_group();
  void add_group(const AttachedGroup& group, SteadyTime now, RankReport& report) const;
  bool is_pending(const OperationKey& key) const;
  void fail_set(std::uint32_t set, int root, const Status& status);
  void obey(const CallOff& call_off);
  void judge(const Report& report, SteadyTime now);
  void call_off(const Diagnosis& diagnosis,
                const std::map<std::uint32_t, std::vector<int>>& members);
  void warn_of(const std::vector<Diagnosis::Stall>& stalls, SteadyTime now);
  void warn_of_deadlock(const std::string& text, SteadyTime now);
  void check_without_inspection(SteadyTime now);
  void check_answers(SteadyTime now);
  void check_parent(SteadyTime now);

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
  // The begin of the longest wait for which an inspection was requested since the last check: the
  // wait may be over later.
  SteadyTime requested_since_ = kNever;
  bool requested_for_groups_ = false;
  // The inspection is for other groups only: nobody owes this one an answer.
  bool is_for_groups_ = false;
  SteadyTime next_at_;
  // The root: all ranks have answered; other ranks: an inspection has come.
  SteadyTime heard_at_;
  // Since when ranks owe the root an answer, while an inspection runs.
  std::optional<SteadyTime> begun_at_;
  // Since when the parent owes an inspection that it was asked for.
  std::optional<SteadyTime> asked_parent_at_;
  SteadyTime last_silence_warning_ = kLongAgo;
  SteadyTime last_deadlock_warning_ = kLongAgo;
  std::map<std::pair<std::uint32_t, std::string>, SteadyTime>
      warned_;  // when, by set and operation

  std::mutex groups_mutex_;
  std::vector<std::shared_ptr<AttachedGroup>> groups_;
  std::shared_ptr<AttachedGroup> own_group_;
  std::atomic<bool> has_groups_{false};  // or is one
};

}  // namespace horoplug
