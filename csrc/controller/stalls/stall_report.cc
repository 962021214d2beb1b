#include "controller/stalls/stall_report.h"

#include <algorithm>
#include <utility>

namespace horoplug {
namespace {

// How many operations a rank names for each of the two reasons. More than a few threads rarely
// wait.
constexpr std::size_t kMostWaited = 64;
constexpr std::size_t kMostOldest = 16;

using OfRank = RankReport::Pending;

std::size_t size_of(const OperationKey& key) { return key.name.size() + key.group.size(); }

// The operations that a rank names in answer to the first question.
std::vector<const OfRank*> named_by(const RankReport& rank) {
  std::vector<const OfRank*> waited;
  std::vector<const OfRank*> others;
  for (const OfRank& pending : rank.pending) {
    (pending.waited ? waited : others).push_back(&pending);
  }
  const auto keep_oldest = [](std::vector<const OfRank*>& operations, std::size_t most) {
    const std::size_t kept = std::min(most, operations.size());
    // By name if the ages are equal, so that ranks name the same operations.
    std::partial_sort(operations.begin(), operations.begin() + static_cast<std::ptrdiff_t>(kept),
                      operations.end(), [](const OfRank* a, const OfRank* b) {
                        return a->age != b->age ? a->age > b->age : a->name < b->name;
                      });
    operations.resize(kept);
  };
  keep_oldest(waited, kMostWaited);
  keep_oldest(others, kMostOldest);
  waited.insert(waited.end(), others.begin(), others.end());
  return waited;
}

}  // namespace

Report answer_of(const RankReport& rank, const InspectionQuestion& question) {
  RankRanges self;
  self.add(rank.rank);
  Report report;
  report.question = question.number;
  report.ranks = 1;
  if (!rank.executing && rank.quiet >= question.quiet) report.quiet = self;
  if (rank.busy_threads > 0) report.busy_threads[rank.busy_threads] = self;

  std::vector<const OfRank*> named;
  if (question.is_second) {
    const std::vector<OperationKey>& asked = question.operations;
    for (const OfRank& pending : rank.pending) {
      const OperationKey own{pending.set, pending.name, pending.group};
      if (std::binary_search(asked.begin(), asked.end(), own)) {
        named.push_back(&pending);
      } else if (pending.waited) {
        report.waiting_for_unnamed = self;
      }
      const auto is_of_set = [&](const OperationKey& key) {
        return key.set == pending.set && key.group.empty();
      };
      if (pending.join && pending.group.empty() &&
          std::any_of(asked.begin(), asked.end(), is_of_set)) {
        report.joined[pending.set] = self;
      }
    }
  } else {
    named = named_by(rank);
  }
  ReportMerge merge(question.number);
  for (const OfRank* pending : named) {
    report.pending.push_back({.key = {pending->set, pending->name, pending->group},
                              .age = pending->age,
                              .join = pending->join,
                              .peer = pending->peer,
                              .submitted = self,
                              .waiting = pending->waited ? self : RankRanges{},
                              .members = RankRanges(pending->members)});
  }
  merge.add(std::move(report));  // two sends may have one description
  return merge.take();
}

void ReportMerge::add(Report report) {
  merged_.ranks += report.ranks;
  merged_.quiet.add(report.quiet);
  merged_.waiting_for_unnamed.add(report.waiting_for_unnamed);
  for (const auto& [set, ranks] : report.joined) merged_.joined[set].add(ranks);
  for (const auto& [threads, ranks] : report.busy_threads) merged_.busy_threads[threads].add(ranks);
  for (Report::Pending& pending : report.pending) {
    const auto [known, is_first] = pending_.try_emplace(pending.key, pending);
    if (is_first) continue;
    Report::Pending& merged = known->second;
    merged.age = std::max(merged.age, pending.age);
    merged.join |= pending.join;
    merged.peer = std::max(merged.peer, pending.peer);
    merged.submitted.add(pending.submitted);
    merged.waiting.add(pending.waiting);
    merged.members.add(pending.members);
  }
}

Report ReportMerge::take() {
  Report report = std::exchange(merged_, {});
  for (auto& [key, pending] : std::exchange(pending_, {})) {
    report.pending.push_back(std::move(pending));
  }
  std::size_t bytes = 0;
  for (const auto& pending : report.pending) bytes += size_of(pending.key);
  if (report.pending.size() <= Report::kMostOperations && bytes <= Report::kMostNameBytes) {
    return report;
  }
  std::stable_sort(report.pending.begin(), report.pending.end(), [](const auto& a, const auto& b) {
    if (a.waiting.empty() != b.waiting.empty()) return b.waiting.empty();
    return a.age > b.age;
  });
  std::size_t kept = 0;
  bytes = 0;
  for (; kept < std::min(report.pending.size(), Report::kMostOperations); ++kept) {
    bytes += size_of(report.pending[kept].key);
    if (bytes > Report::kMostNameBytes) break;
  }
  report.pending.resize(kept);
  std::sort(report.pending.begin(), report.pending.end(),
            [](const auto& a, const auto& b) { return a.key < b.key; });
  return report;
}

}  // namespace horoplug
