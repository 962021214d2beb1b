#include "controller/state/rank_ranges.h"

#include <algorithm>
#include <utility>

namespace horoplug {

RankRanges::RankRanges(std::span<const int> ranks) {
  std::vector<Range> ranges;
  for (const int rank : ranks) {
    if (!ranges.empty() && ranges.back().last + 1 == rank) {
      ranges.back().last = rank;
    } else {
      ranges.push_back({rank, rank});
    }
  }
  *this = RankRanges(std::move(ranges));
}

RankRanges::RankRanges(std::vector<Range> ranges) : ranges_(std::move(ranges)) {
  if (ranges_.empty()) return;
  std::sort(ranges_.begin(), ranges_.end(),
            [](const Range& a, const Range& b) { return a.first < b.first; });
  std::size_t kept = 0;
  for (std::size_t i = 1; i < ranges_.size(); ++i) {
    // Ranks are smaller than the greatest int.
    if (ranges_[i].first <= ranges_[kept].last + 1) {
      ranges_[kept].last = std::max(ranges_[kept].last, ranges_[i].last);
    } else {
      ranges_[++kept] = ranges_[i];
    }
  }
  ranges_.resize(kept + 1);
}

std::size_t RankRanges::count() const {
  std::size_t count = 0;
  for (const Range& range : ranges_)
    count += static_cast<std::size_t>(range.last - range.first) + 1;
  return count;
}

bool RankRanges::contains(int rank) const {
  const auto after =
      std::upper_bound(ranges_.begin(), ranges_.end(), rank,
                       [](int value, const Range& range) { return value < range.first; });
  return after != ranges_.begin() && std::prev(after)->last >= rank;
}

bool RankRanges::overlaps(const RankRanges& other) const {
  auto mine = ranges_.begin();
  auto theirs = other.ranges_.begin();
  while (mine != ranges_.end() && theirs != other.ranges_.end()) {
    if (mine->last < theirs->first) {
      ++mine;
    } else if (theirs->last < mine->first) {
      ++theirs;
    } else {
      return true;
    }
  }
  return false;
}

void RankRanges::add(const RankRanges& other) {
  if (other.empty()) return;
  std::vector<Range> both = std::move(ranges_);
  both.insert(both.end(), other.ranges_.begin(), other.ranges_.end());
  *this = RankRanges(std::move(both));
}

RankRanges RankRanges::without(const RankRanges& other) const {
  RankRanges rest;
  auto taken = other.ranges_.begin();
  for (Range range : ranges_) {
    while (taken != other.ranges_.end() && taken->last < range.first) ++taken;
    // The last range that is taken away may also begin before the next range of this set.
    for (auto each = taken; each != other.ranges_.end() && each->first <= range.last; ++each) {
      if (each->first > range.first) rest.ranges_.push_back({range.first, each->first - 1});
      range.first = each->last + 1;
      if (range.first > range.last) break;
    }
    if (range.first <= range.last) rest.ranges_.push_back(range);
  }
  return rest;
}

std::vector<int> RankRanges::ranks(std::size_t limit) const {
  std::vector<int> ranks;
  for (const Range& range : ranges_) {
    for (int rank = range.first; rank <= range.last; ++rank) {
      if (ranks.size() == limit) return ranks;
      ranks.push_back(rank);
    }
  }
  return ranks;
}

}  // namespace horoplug
