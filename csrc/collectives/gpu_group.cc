#include "collectives/gpu_group.h"

#include <cstdio>
#include <utility>

#include "base/status.h"

namespace horoplug {

Task GpuGroup::agree(Comm&) {
  agreed_ = true;
  co_return;
}

void GpuGroup::track(std::string what, cuda::EventPtr begun, cuda::EventPtr ended) {
  under_way_.push_back({std::move(what), std::move(begun), std::move(ended)});
}

void GpuGroup::watch(double now, double limit) {
  while (!under_way_.empty() && under_way_.front().ended->done()) under_way_.pop_front();
  if (under_way_.empty()) return;
  Work& first = under_way_.front();
  // What the framework's streams have to do before may take any time.
  if (first.seen < 0) {
    if (first.begun->done()) first.seen = now;
    return;
  }
  if (now - first.seen < limit) return;
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%.3g s", limit);
  throw Error(HP_TIMEOUT, first.what + " has not ended on the GPU for " + seconds +
                              " (HOROVOD_GLOO_TIMEOUT_SECONDS sets this limit)");
}

std::string GpuGroup::unfinished() const {
  if (under_way_.empty()) return {};
  std::string text = under_way_.front().what;
  if (under_way_.size() > 1) {
    text += " and " + std::to_string(under_way_.size() - 1) + " more after it";
  }
  return text;
}

Task GpuGroup::host_memory_free() {
  if (host_memory_free_) co_await Passed(std::exchange(host_memory_free_, nullptr));
}

void GpuGroup::abort() { under_way_.clear(); }

}  // namespace horoplug
