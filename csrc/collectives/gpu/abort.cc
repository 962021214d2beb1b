// After a failure, work on a rank's GPU may wait for ranks that never come. Releasing a resource on
// the GPU may wait for all work on it, of any process set: NCCL's communicators free memory, and
// memory of other ranks is closed. Therefore all work is first told to end, and resources are
// released afterwards.
#include <chrono>
#include <future>
#include <memory>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "base/status.h"
#include "collectives/gpu/gpu_group.h"

namespace horoplug {
namespace {

using Clock = std::chrono::steady_clock;

// Limit for the time that the GPU needs to pass the work that a failure has left in its streams.
constexpr auto kLastWork = std::chrono::seconds(2);

bool passed(const cuda::EventPtr& event) {
  try {
    return event->done();
  } catch (const Error&) {
    return true;  // the GPU has failed and runs nothing any more
  }
}

// ncclCommAbort ends a communicator's operations at once and then waits for the GPU, which may be
// running operations of other communicators. Each abort therefore runs in a thread of its own. (A
// group of aborts would do, but only since NCCL 2.22.) A call that does not return is left behind.
std::future<void> abort_nccl(std::unique_ptr<cuda::NcclCommunicator> communicator) {
  std::packaged_task<void()> task([owned = std::shared_ptr(std::move(communicator))]() mutable {
    owned->abort();
    owned.reset();  // before other threads learn that the abort is done
  });
  std::future<void> done = task.get_future();
  std::thread(std::move(task)).detach();
  return done;
}

}  // namespace

// Includes the communicator of this host's ranks.
void GpuGroup::add_to(std::vector<GpuGroup*>& all) {
  all.push_back(this);
  if (host_) host_->add_to(all);
}

void GpuGroup::abort(std::span<GpuGroup* const> groups) {
  std::vector<GpuGroup*> all;
  for (GpuGroup* const group : groups) group->add_to(all);
  std::vector<std::future<void>> aborts;
  std::vector<cuda::EventPtr> ends;
  for (GpuGroup* const group : all) {
    group->under_way_.clear();
    if (group->nccl_) aborts.push_back(abort_nccl(std::move(group->nccl_)));
    try {
      ends.push_back(group->workspace_.mark());
    } catch (const Error&) {
      // Nothing runs on a GPU that has failed.
    }
  }
  const auto until = Clock::now() + kLastWork;
  const auto release = [&all] {
    for (GpuGroup* const group : all) {
      if (group->ipc_) group->ipc_->release();
    }
  };
  const auto at_work = [&ends] {
    std::erase_if(ends, passed);
    return !ends.empty();
  };
  for (release(); at_work() && Clock::now() < until; release()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  bool ended = ends.empty();
  for (const std::future<void>& done : aborts) {
    ended &= done.wait_until(until) == std::future_status::ready;
  }
  for (GpuGroup* const group : all) {
    if (!group->ipc_) continue;
    if (ended) {
      group->ipc_->close();
    } else {
      static_cast<void>(group->ipc_.release());  // releasing it would wait for the rest
    }
  }
}

}  // namespace horoplug
