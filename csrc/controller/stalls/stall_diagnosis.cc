#include "controller/stalls/stall_diagnosis.h"

#include <algorithm>
#include <cstdio>
#include <set>

#include "base/status.h"

namespace horoplug {
namespace {

// Lists in error messages are cut here; a job may have thousands of ranks.
constexpr std::size_t kMaxListed = 16;

std::string describe(const OperationKey& key) {
  const std::string text = "'" + key.name + "'";
  const std::string set = key.set == 0 ? "" : " in process set " + std::to_string(key.set);
  return text + set + (key.group.empty() ? "" : " in group " + key.group);
}

std::string describe(const RankRanges& ranks) { return describe_ranks(ranks.ranks()); }

std::string describe(Seconds age) {
  char text[32];
  std::snprintf(text, sizeof text, age < Seconds(10) ? "%.1f s" : "%.0f s", age.count());
  return text;
}

// One named operation over the whole job.
struct Waiting {
  const Report::Pending* pending;
  RankRanges missing;
};

std::vector<Waiting> tabulate(const Report& report, const DiagnoseOptions& options) {
  std::map<std::uint32_t, RankRanges> members;
  for (const auto& [set, ranks] : options.members) members[set] = RankRanges(ranks);
  std::vector<Waiting> table;
  for (const Report::Pending& pending : report.pending) {
    const bool is_own = pending.key.group.empty();
    const auto set = members.find(pending.key.set);
    // The set was added or removed meanwhile; or no rank has the operation any more.
    if ((is_own && set == members.end()) || pending.submitted.empty()) continue;
    Waiting waiting{&pending, {}};
    if (pending.peer >= 0) {
      waiting.missing.add(pending.peer);
    } else {
      waiting.missing = (is_own ? set->second : pending.members).without(pending.submitted);
      // A rank that has joined a set is missing in none of its operations except the join.
      const auto joined = report.joined.find(pending.key.set);
      if (is_own && !pending.join && joined != report.joined.end()) {
        waiting.missing = waiting.missing.without(joined->second);
      }
    }
    table.push_back(std::move(waiting));
  }
  return table;
}

// The ranks that wait only for each other, so that none of them can ever continue. If it
// `is_known`, ranks that have busy threads or wait for operations that are not named are not among
// them.
RankRanges find_stuck(const Report& report, const std::vector<Waiting>& table, bool is_known) {
  RankRanges blocked;
  for (const Waiting& waiting : table) blocked.add(waiting.pending->waiting);
  if (!is_known) blocked.add(report.waiting_for_unnamed);
  RankRanges stuck = blocked.without(blocked.without(report.quiet));
  if (is_known) {
    stuck = stuck.without(report.waiting_for_unnamed);
    for (const auto& [threads, ranks] : report.busy_threads) stuck = stuck.without(ranks);
  }
  // A rank is not stuck if a rank that can continue may help it. Repeat until nothing changes.
  for (bool changed = true; changed;) {
    changed = false;
    for (const Waiting& waiting : table) {
      if (!stuck.overlaps(waiting.pending->waiting)) continue;
      // Submitted everywhere: the operation is being decided or executed, and other deadlines
      // apply.
      const bool hopeless = !waiting.missing.empty() && stuck.contains(waiting.missing);
      if (hopeless) continue;
      stuck = stuck.without(waiting.pending->waiting);
      changed = true;
    }
  }
  return stuck;
}

// Whether the ranks wait in one other group only, which finds the deadlock itself.
bool is_of_one_other_group(const std::vector<Waiting>& table, const RankRanges& stuck) {
  std::set<std::string> groups;
  for (const Waiting& waiting : table) {
    if (waiting.pending->waiting.overlaps(stuck)) groups.insert(waiting.pending->key.group);
  }
  return groups.size() == 1 && !groups.contains("");
}

std::string describe_busy(const Report& report, int rank) {
  for (const auto& [threads, ranks] : report.busy_threads) {
    if (!ranks.contains(rank)) continue;
    return threads == 1 ? ", and has a thread that does not wait"
                        : ", and has " + std::to_string(threads) + " threads that do not wait";
  }
  return {};
}

// For a deadlock as well as for a possible one.
std::string describe_deadlock(const Report& report, const std::vector<Waiting>& table,
                              const RankRanges& stuck) {
  std::string text =
      (stuck.count() == report.ranks ? "every rank waits" : describe(stuck) + " wait") +
      " for an operation that another rank has not submitted.";
  std::size_t listed = 0;
  for (const int rank : stuck.ranks(kMaxListed + 1)) {
    if (listed++ == kMaxListed) {
      text += " …";
      break;
    }
    text += (listed == 1 ? " Rank " : "; rank ") + std::to_string(rank) + " waits for ";
    std::size_t names = 0;
    for (const Waiting& waiting : table) {
      if (!waiting.pending->waiting.contains(rank)) continue;
      if (names++ == 4) {
        text += " …";
        break;
      }
      text += (names == 1 ? "" : ", ") + describe(waiting.pending->key) + " (not submitted by " +
              describe(waiting.missing) + ")";
    }
    if (names == 0) text += "one of very many operations";
    text += describe_busy(report, rank);
  }
  return text;
}

}  // namespace

Diagnosis diagnose(const Report& report, const DiagnoseOptions& options) {
  const std::vector<Waiting> table = tabulate(report, options);
  Diagnosis diagnosis;
  for (const Waiting& waiting : table) {
    const Report::Pending& pending = *waiting.pending;
    if (waiting.missing.empty() || !pending.key.group.empty()) continue;
    const bool is_overdue = pending.age >= options.overdue_time;
    const bool is_stall = pending.age >= options.stall_time;
    if (!is_overdue && !is_stall) continue;
    std::string text = describe(pending.key) + " has been waiting for " +
                       describe(waiting.missing) + " for " + describe(pending.age) +
                       " (submitted by " + describe(pending.submitted) + ")";
    if (is_overdue && !diagnosis.overdue) diagnosis.overdue = text;
    if (is_stall) {
      diagnosis.stalls.push_back({pending.key.set, pending.key.name, pending.age, std::move(text)});
    }
  }
  std::stable_sort(diagnosis.stalls.begin(), diagnosis.stalls.end(),
                   [](const auto& a, const auto& b) { return a.age > b.age; });
  if (!options.finds_deadlocks) return diagnosis;
  const RankRanges stuck = find_stuck(report, table, true);
  if (stuck.empty()) {
    const RankRanges may_be_stuck = find_stuck(report, table, false);
    if (!may_be_stuck.empty() && !is_of_one_other_group(table, may_be_stuck)) {
      diagnosis.possible_deadlock =
          "possible deadlock: " + describe_deadlock(report, table, may_be_stuck) +
          ". If none of these threads submits the operations, call the same operations in the "
          "same order on every rank";
    }
    return diagnosis;
  }
  if (is_of_one_other_group(table, stuck)) return diagnosis;
  diagnosis.deadlock = "deadlock: " + describe_deadlock(report, table, stuck) +
                       ". Call the same operations in the same order on every rank";
  std::set<std::uint32_t> sets;
  std::set<std::pair<std::string, std::uint32_t>> elsewhere;
  for (const Waiting& waiting : table) {
    const auto& [pending, missing] = waiting;
    for (const int rank : pending->waiting.ranks()) {
      if (!stuck.contains(rank)) continue;
      if (pending->key.group.empty()) {
        sets.insert(pending->key.set);
      } else if (elsewhere.emplace(pending->key.group, pending->key.set).second) {
        diagnosis.deadlocked_elsewhere.emplace_back(pending->key, rank);
      }
      break;
    }
  }
  diagnosis.deadlocked_sets.assign(sets.begin(), sets.end());
  return diagnosis;
}

}  // namespace horoplug
