// A set of ranks as ranges. Its size is that of the differences between neighbouring ranks, not
// that of the job: operations mostly concern all ranks of a job but a few.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <span>
#include <vector>

namespace horoplug {

class RankRanges {
 public:
  struct Range {
    int first;
    int last;
    bool operator==(const Range&) const = default;
  };

  RankRanges() = default;
  RankRanges(std::initializer_list<int> ranks) : RankRanges(std::span(ranks)) {}
  explicit RankRanges(std::span<const int> ranks);
  // Ranges in any order, which may overlap.
  explicit RankRanges(std::vector<Range> ranges);

  bool empty() const { return ranges_.empty(); }
  std::size_t count() const;
  bool contains(int rank) const;
  bool contains(const RankRanges& other) const { return other.without(*this).empty(); }
  bool overlaps(const RankRanges& other) const;
  void add(int rank) { add(RankRanges(std::vector<Range>{{rank, rank}})); }
  void add(const RankRanges& other);
  RankRanges without(const RankRanges& other) const;

  // Ascending, and not adjacent.
  const std::vector<Range>& ranges() const { return ranges_; }
  // At most so many of the first ranks.
  std::vector<int> ranks(std::size_t limit = static_cast<std::size_t>(-1)) const;

  bool operator==(const RankRanges&) const = default;

 private:
  std::vector<Range> ranges_;
};

}  // namespace horoplug
