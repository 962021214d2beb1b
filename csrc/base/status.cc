#include "base/status.h"

#include <algorithm>

namespace horoplug {

std::string describe_ranks(std::vector<int> ranks, std::size_t limit) {
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  if (ranks.empty()) return "no rank";
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  std::size_t ranges = 0;
  for (std::size_t i = 0; i < ranks.size();) {
    if (ranges == limit) {
      return text + " and " + std::to_string(ranks.size() - i) + " more";
    }
    std::size_t end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    if (ranges++ > 0) text += ", ";
    text += std::to_string(ranks[i]);
    if (end - i == 2) text += ", " + std::to_string(ranks[end - 1]);
    if (end - i > 2) text += "-" + std::to_string(ranks[end - 1]);
    i = end;
  }
  return text;
}

}  // namespace horoplug
