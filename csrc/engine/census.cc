#include "engine/census.h"

#include <algorithm>
#include <cstdio>
#include <map>

namespace horoplug {
namespace {

// Lists in error messages end here; a job may have thousands of ranks.
constexpr std::size_t kMaxListed = 16;

std::string seconds(double value) {
  char text[32];
  std::snprintf(text, sizeof text, value < 10 ? "%.1f s" : "%.0f s", value);
  return text;
}

// One pending operation as the whole job has it.
struct Waiting {
  std::vector<int> submitted_by;
  double age = 0;
};

using WaitingTable = std::map<std::pair<std::uint32_t, std::string>, Waiting>;

std::vector<int> missing_ranks(const Waiting& waiting, int size) {
  std::vector<int> have = waiting.submitted_by;
  std::sort(have.begin(), have.end());
  std::vector<int> missing;
  for (int rank = 0; rank < size; ++rank) {
    if (!std::binary_search(have.begin(), have.end(), rank)) missing.push_back(rank);
  }
  return missing;
}

std::string describe_deadlock(const Report& report, const WaitingTable& table, int size) {
  std::string text =
      "deadlock: every rank waits for an operation that another rank has not submitted.";
  std::size_t listed = 0;
  for (const RankReport& rank : report.ranks) {
    if (listed++ == kMaxListed) {
      text += " …";
      break;
    }
    text += (listed == 1 ? " Rank " : "; rank ") + std::to_string(rank.rank) + " waits for ";
    std::size_t names = 0;
    for (const auto& pending : rank.pending) {
      if (!pending.waited) continue;
      if (names++ == 4) {
        text += " …";
        break;
      }
      const auto missing = missing_ranks(table.at({pending.set, pending.name}), size);
      text += (names == 1 ? "'" : ", '") + pending.name + "' (not submitted by " +
              describe_ranks(missing) + ")";
    }
  }
  return text + ". Call the same operations in the same order on every rank.";
}

}  // namespace

void Census::begin() {
  if (running_) return;
  ask(last_census_ + 1);
}

void Census::ask(std::uint64_t census) {
  last_census_ = census;
  running_ = true;
  wants_answer_ = true;
  complete_ = false;
  report_ = {census, {}};
  answered_.assign(place_.children.size(), false);
  for (const int child : place_.children) outgoing_.push_back({child, encode_census(census)});
}

void Census::receive_census(int from, std::uint64_t census) {
  if (from != place_.parent) throw WireError("it is not the parent of this rank");
  ask(census);
}

void Census::receive(int from, Report report) {
  const auto found = std::find(place_.children.begin(), place_.children.end(), from);
  if (found == place_.children.end()) throw WireError("it is no child of this rank");
  const auto child = static_cast<std::size_t>(found - place_.children.begin());
  // The answer to a question that has been asked again since.
  if (!running_ || report.census != last_census_ || answered_[child]) return;
  if (report.ranks.size() != place_.subtrees[child].size())
    throw WireError("not all have answered");
  answered_[child] = true;
  std::move(report.ranks.begin(), report.ranks.end(), std::back_inserter(report_.ranks));
  finish_if_complete();
}

void Census::answer(RankReport report) {
  if (!wants_answer_) return;
  wants_answer_ = false;
  report_.ranks.push_back(std::move(report));
  finish_if_complete();
}

void Census::finish_if_complete() {
  if (wants_answer_ || std::find(answered_.begin(), answered_.end(), false) != answered_.end()) {
    return;
  }
  running_ = false;
  if (place_.is_root()) {
    complete_ = true;
  } else {
    outgoing_.push_back({place_.parent, encode(report_)});
  }
}

std::optional<Report> Census::take_result() {
  if (!complete_) return std::nullopt;
  complete_ = false;
  std::sort(report_.ranks.begin(), report_.ranks.end(),
            [](const RankReport& a, const RankReport& b) { return a.rank < b.rank; });
  return std::move(report_);
}

std::vector<int> Census::unanswered() const {
  std::vector<int> ranks;
  for (std::size_t child = 0; child < answered_.size(); ++child) {
    if (answered_[child]) continue;
    const auto& below = place_.subtrees[child];
    ranks.insert(ranks.end(), below.begin(), below.end());
  }
  return ranks;
}

Diagnosis diagnose(const Report& report, const DiagnoseOptions& options) {
  WaitingTable table;
  bool all_blocked = true;
  for (const RankReport& rank : report.ranks) {
    bool blocked = false;
    for (const auto& pending : rank.pending) {
      Waiting& waiting = table[{pending.set, pending.name}];
      waiting.submitted_by.push_back(rank.rank);
      waiting.age = std::max(waiting.age, pending.age);
      blocked |= pending.waited;
    }
    all_blocked = all_blocked && blocked && !rank.executing && rank.quiet >= options.deadlock_time;
  }

  Diagnosis diagnosis;
  bool can_proceed = false;
  for (const auto& [key, waiting] : table) {
    const std::vector<int> missing = missing_ranks(waiting, options.size);
    // Submitted everywhere: it is being decided or run at this moment, and watched there.
    if (missing.empty()) {
      can_proceed = true;
      continue;
    }
    std::string text = "'" + key.second + "' has been waiting for " + describe_ranks(missing) +
                       " for " + seconds(waiting.age) + " (submitted by " +
                       describe_ranks(waiting.submitted_by) + ")";
    if (options.overdue_time >= 0 && waiting.age >= options.overdue_time && !diagnosis.overdue) {
      diagnosis.overdue = text;
    }
    if (options.stall_time >= 0 && waiting.age >= options.stall_time) {
      diagnosis.stalls.push_back({key.second, waiting.age, missing, std::move(text)});
    }
  }
  std::stable_sort(diagnosis.stalls.begin(), diagnosis.stalls.end(),
                   [](const auto& a, const auto& b) { return a.age > b.age; });
  if (options.deadlock_time >= 0 && all_blocked && !can_proceed) {
    diagnosis.deadlock = describe_deadlock(report, table, options.size);
  }
  return diagnosis;
}

}  // namespace horoplug
