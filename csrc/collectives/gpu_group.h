// The GPUs of a process set's ranks: what they can do together, and what is under way on this one.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "base/task.h"
#include "collectives/comm.h"
#include "device/cuda/workspace.h"

namespace horoplug {

class GpuGroup {
 public:
  explicit GpuGroup(std::shared_ptr<cuda::Card> card) : workspace_(std::move(card)) {}

  // On this rank's card.
  cuda::Workspace& workspace() { return workspace_; }

  // Collective, in the first batch of tensors on GPUs: ranks tell each other what they have, so
  // that all of them choose the same algorithms.
  Task agree(Comm& comm);
  bool agreed() const { return agreed_; }

  // ---- what is under way on the card, for who watches over it

  // All that a batch does there lies between these two. `what`: for messages.
  void track(std::string what, cuda::EventPtr begun, cuda::EventPtr ended);
  // Forgets what has ended. Throws Error (HP_TIMEOUT) if something has begun, and not ended
  // `limit` seconds after it was seen to have, and the card's own failure. `now`: seconds.
  void watch(double now, double limit);
  // Whether there may be anything.
  bool busy() const { return !under_way_.empty(); }
  // "allreduce 'a' and 2 others": what may not have ended; empty: nothing.
  std::string unfinished() const;
  // The host's working memory is free to be written again, once the card has come to that.
  void keep_host_memory(cuda::EventPtr until) { host_memory_free_ = std::move(until); }
  Task host_memory_free();
  // Ends what is under way, as nobody will come to it any more: results are undefined.
  void abort();

 private:
  struct Work {
    std::string what;
    cuda::EventPtr begun, ended;
    double seen = -1;  // when it had begun
  };

  cuda::Workspace workspace_;
  bool agreed_ = false;
  std::deque<Work> under_way_;
  cuda::EventPtr host_memory_free_;
};

// Waits until the card has come to an event. Nobody says when it does.
class Passed final : public Waitable {
 public:
  explicit Passed(cuda::EventPtr event) : event_(std::move(event)) {}
  bool ready() override { return event_->done(); }
  void blame(std::vector<int>&) const override {}  // this rank's own card
  bool polled() const override { return true; }

 private:
  const cuda::EventPtr event_;
};

}  // namespace horoplug
