// Which peers are still there. Used by the thread that runs the loop.
#pragma once

#include <cstdint>
#include <optional>

#include "base/by_rank.h"
#include "base/time.h"
#include "transport/mesh.h"

namespace horoplug {

class Peers {
 public:
  explicit Peers(Mesh& mesh) : mesh_(mesh), departed_(static_cast<std::size_t>(mesh.size())) {}

  // Throws Error(HP_ABORTED) if a link has failed whose peer has not said goodbye.
  void check_links();
  // Whether check_links() has to be called again soon.
  bool undecided() const { return undecided_since_.has_value(); }
  // A peer has said goodbye.
  void receive_bye(int from);
  bool has_departed(int rank) const { return departed_[rank]; }
  bool any_departed() const { return any_departed_; }
  // This rank says goodbye to all peers. Links that fail from here on are of no interest.
  void say_bye();
  bool said_bye() const { return said_bye_; }

 private:
  Mesh& mesh_;
  std::uint64_t checked_failures_ = 0;
  std::optional<SteadyTime> undecided_since_;  // a link has failed, and its peer may still say why
  ByRank<bool> departed_;                      // it has said goodbye, or its link has failed
  bool any_departed_ = false;
  bool said_bye_ = false;
};

}  // namespace horoplug
