#include "controller/stall_inspection.h"

#include <algorithm>
#include <cstdio>
#include <limits>
#include <map>
#include <set>

namespace horoplug {
namespace {

// Lists in error messages are cut here; a job may have thousands of ranks.
constexpr std::size_t kMaxListed = 16;

std::string describe(const std::pair<std::uint32_t, std::string>& key) {
  const std::string text = "'" + key.second + "'";
  return key.first == 0 ? text : text + " in process set " + std::to_string(key.first);
}

std::string seconds(double value) {
  char text[32];
  std::snprintf(text, sizeof text, value < 10 ? "%.1f s" : "%.0f s", value);
  return text;
}

// One pending operation over the whole job.
struct Waiting {
  std::vector<int> submitted_by;
  double age = 0;
  std::vector<int> missing;
};

using Key = std::pair<std::uint32_t, std::string>;
using WaitingTable = std::map<Key, Waiting>;

WaitingTable tabulate(const Report& report, const DiagnoseOptions& options) {
  WaitingTable table;
  // A rank that has joined a set is missing in none of its operations except the join.
  std::map<std::uint32_t, std::vector<int>> joined;
  std::map<Key, bool> is_join;
  for (const RankReport& rank : report.ranks) {
    for (const auto& pending : rank.pending) {
      // The set was added or removed meanwhile.
      if (!options.members.contains(pending.set)) continue;
      const Key key{pending.set, pending.name};
      Waiting& waiting = table[key];
      waiting.submitted_by.push_back(rank.rank);
      waiting.age = std::max(waiting.age, pending.age);
      if (pending.join) joined[pending.set].push_back(rank.rank);
      is_join[key] = pending.join;
      if (pending.peer >= 0) waiting.missing = {pending.peer};
    }
  }
  for (auto& [key, waiting] : table) {
    if (!waiting.missing.empty()) continue;  // a send or a recv
    std::vector<int> present = waiting.submitted_by;
    if (!is_join[key]) {
      const auto& absent = joined[key.first];
      present.insert(present.end(), absent.begin(), absent.end());
    }
    std::sort(present.begin(), present.end());
    const auto& members = options.members.at(key.first);
    std::set_difference(members.begin(), members.end(), present.begin(), present.end(),
                        std::back_inserter(waiting.missing));
  }
  return table;
}

// The known operations that a rank's threads wait for.
std::vector<Key> waited_by(const RankReport& rank, const WaitingTable& table) {
  std::vector<Key> keys;
  for (const auto& pending : rank.pending) {
    if (pending.waited && table.contains({pending.set, pending.name})) {
      keys.emplace_back(pending.set, pending.name);
    }
  }
  return keys;
}

// The ranks that wait only for each other, so that none of them can ever continue. `most_busy`: the
// number of threads that do not wait which a rank in a deadlock may have.
std::set<int> find_stuck(const Report& report, const WaitingTable& table, double quiet,
                         std::uint32_t most_busy) {
  std::set<int> stuck;
  for (const RankReport& rank : report.ranks) {
    if (!rank.executing && rank.quiet >= quiet && rank.busy_threads <= most_busy &&
        !waited_by(rank, table).empty()) {
      stuck.insert(rank.rank);
    }
  }
  const auto hopeless = [&](const Key& key) {
    const auto& missing = table.at(key).missing;
    // Submitted everywhere: the operation is being decided or executed, and other deadlines apply.
    return !missing.empty() && std::all_of(missing.begin(), missing.end(),
                                           [&](int rank) { return stuck.contains(rank); });
  };
  // A rank is not stuck if a rank that can continue may help it. Repeat until nothing changes.
  for (bool changed = true; changed;) {
    changed = false;
    for (const RankReport& rank : report.ranks) {
      const auto keys = waited_by(rank, table);
      if (stuck.contains(rank.rank) && !std::all_of(keys.begin(), keys.end(), hopeless)) {
        stuck.erase(rank.rank);
        changed = true;
      }
    }
  }
  return stuck;
}

std::string describe_busy(std::uint32_t threads) {
  if (threads == 0) return {};
  return threads == 1 ? ", and has a thread that does not wait"
                      : ", and has " + std::to_string(threads) + " threads that do not wait";
}

// For a deadlock as well as for a possible one.
std::string describe_deadlock(const Report& report, const WaitingTable& table,
                              const std::set<int>& stuck) {
  std::string text = (stuck.size() == report.ranks.size()
                          ? std::string("every rank waits")
                          : describe_ranks({stuck.begin(), stuck.end()}) + " wait") +
                     " for an operation that another rank has not submitted.";
  std::size_t listed = 0;
  for (const RankReport& rank : report.ranks) {
    if (!stuck.contains(rank.rank)) continue;
    if (listed++ == kMaxListed) {
      text += " …";
      break;
    }
    text += (listed == 1 ? " Rank " : "; rank ") + std::to_string(rank.rank) + " waits for ";
    std::size_t names = 0;
    for (const Key& key : waited_by(rank, table)) {
      if (names++ == 4) {
        text += " …";
        break;
      }
      text += (names == 1 ? "" : ", ") + describe(key) + " (not submitted by " +
              describe_ranks(table.at(key).missing) + ")";
    }
    text += describe_busy(rank.busy_threads);
  }
  return text;
}

}  // namespace

void StallInspection::begin() {
  if (running_) return;
  ask(last_inspection_ + 1);
}

void StallInspection::ask(std::uint64_t inspection) {
  last_inspection_ = inspection;
  running_ = true;
  wants_answer_ = true;
  complete_ = false;
  report_ = {inspection, {}};
  answered_.assign(position_.children.size(), false);
  for (const int child : position_.children)
    outgoing_.push_back({child, encode_inspection(inspection)});
}

void StallInspection::receive_inspection(int from, std::uint64_t inspection) {
  if (from != position_.parent) throw WireError("the sender is not the parent of this rank");
  ask(inspection);
}

void StallInspection::receive(int from, Report report) {
  const auto found = std::find(position_.children.begin(), position_.children.end(), from);
  if (found == position_.children.end()) throw WireError("the sender is not a child of this rank");
  const auto child = static_cast<std::size_t>(found - position_.children.begin());
  // The answer belongs to an earlier question.
  if (!running_ || report.inspection != last_inspection_ || answered_[child]) return;
  if (report.ranks.size() != position_.subtrees[child].size())
    throw WireError("incomplete stall inspection report");
  answered_[child] = true;
  std::move(report.ranks.begin(), report.ranks.end(), std::back_inserter(report_.ranks));
  finish_if_complete();
}

void StallInspection::answer(RankReport report) {
  if (!wants_answer_) return;
  wants_answer_ = false;
  report_.ranks.push_back(std::move(report));
  finish_if_complete();
}

void StallInspection::finish_if_complete() {
  if (wants_answer_ || std::find(answered_.begin(), answered_.end(), false) != answered_.end()) {
    return;
  }
  running_ = false;
  if (position_.is_root()) {
    complete_ = true;
  } else {
    outgoing_.push_back({position_.parent, encode(report_)});
  }
}

std::optional<Report> StallInspection::take_result() {
  if (!complete_) return std::nullopt;
  complete_ = false;
  std::sort(report_.ranks.begin(), report_.ranks.end(),
            [](const RankReport& a, const RankReport& b) { return a.rank < b.rank; });
  return std::move(report_);
}

std::vector<int> StallInspection::unanswered() const {
  std::vector<int> ranks;
  for (std::size_t child = 0; child < answered_.size(); ++child) {
    if (answered_[child]) continue;
    const auto& below = position_.subtrees[child];
    ranks.insert(ranks.end(), below.begin(), below.end());
  }
  return ranks;
}

Diagnosis diagnose(const Report& report, const DiagnoseOptions& options) {
  const WaitingTable table = tabulate(report, options);
  Diagnosis diagnosis;
  for (const auto& [key, waiting] : table) {
    if (waiting.missing.empty()) continue;
    std::string text = describe(key) + " has been waiting for " + describe_ranks(waiting.missing) +
                       " for " + seconds(waiting.age) + " (submitted by " +
                       describe_ranks(waiting.submitted_by) + ")";
    if (options.overdue_time >= 0 && waiting.age >= options.overdue_time && !diagnosis.overdue) {
      diagnosis.overdue = text;
    }
    if (options.stall_time >= 0 && waiting.age >= options.stall_time) {
      diagnosis.stalls.push_back(
          {key.first, key.second, waiting.age, waiting.missing, std::move(text)});
    }
  }
  std::stable_sort(diagnosis.stalls.begin(), diagnosis.stalls.end(),
                   [](const auto& a, const auto& b) { return a.age > b.age; });
  if (options.deadlock_time < 0) return diagnosis;
  const std::set<int> stuck = find_stuck(report, table, options.deadlock_time, 0);
  if (stuck.empty()) {
    const auto may_be_stuck =
        find_stuck(report, table, options.deadlock_time, std::numeric_limits<std::uint32_t>::max());
    if (!may_be_stuck.empty()) {
      diagnosis.possible_deadlock =
          "possible deadlock: " + describe_deadlock(report, table, may_be_stuck) +
          ". If none of these threads submits the operations, call the same operations in the "
          "same order on every rank.";
    }
    return diagnosis;
  }
  diagnosis.deadlock = "deadlock: " + describe_deadlock(report, table, stuck) +
                       ". Call the same operations in the same order on every rank.";
  std::set<std::uint32_t> sets;
  for (const RankReport& rank : report.ranks) {
    if (!stuck.contains(rank.rank)) continue;
    for (const Key& key : waited_by(rank, table)) sets.insert(key.first);
  }
  diagnosis.deadlocked_sets.assign(sets.begin(), sets.end());
  return diagnosis;
}

}  // namespace horoplug
