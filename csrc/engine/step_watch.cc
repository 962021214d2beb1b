#include "engine/step_watch.h"

#include <utility>

namespace horoplug {

void StepWatch::note(std::uint32_t id) {
  if (current_.contains(id)) {
    repeated_ = at_boundary() ? repeated_ + 1 : 0;
    last_ = std::exchange(current_, {});
    order_.clear();
    misses_ = 0;
  }
  current_.insert(id);
  order_.push_back(id);
  if (!last_.contains(id)) ++misses_;
}

}  // namespace horoplug
