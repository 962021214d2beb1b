// What is under way on a rank's GPU when the job has failed may wait for ranks that never come,
// and whoever gives something back there may wait for all that is under way, of whatever process
// set: NCCL's communicators free memory, and memory of other ranks is closed. So first everything
// is told to go on, and when that has been done, what there was is given back.
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

// How long the GPU may take to go through what a failure has left in its streams.
constexpr auto kLastWork = std::chrono::seconds(2);

bool passed(const cuda::EventPtr& event) {
  try {
    return event->done();
  } catch (const Error&) {
    return true;  // the GPU has failed, and is at nothing any more
  }
}

// NCCL tells a communicator's operations at once to end, and then waits for the GPU, which may be
// at those of others: so each has a thread of its own. (A group of aborts would do, but only since
// NCCL 2.22.) One that does not come back is left behind.
std::future<void> abort_nccl(std::unique_ptr<cuda::NcclCommunicator> communicator) {
  std::packaged_task<void()> task([owned = std::shared_ptr(std::move(communicator))]() mutable {
    owned->abort();
    owned.reset();  // before anybody hears that it is done
  });
  std::future<void> done = task.get_future();
  std::thread(std::move(task)).detach();
  return done;
}

}  // namespace

// With that of the ranks of this host.
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
      // Nothing is under way on a GPU that has failed.
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
      static_cast<void>(group->ipc_.release());  // giving it back would wait for the rest
    }
  }
}

}  // namespace horoplug
