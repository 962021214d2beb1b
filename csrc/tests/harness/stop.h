// Stops an engine as SIGSTOP stops a process: the thread that runs its loop stays in a completion
// call until the object is released, so that it neither moves data nor answers.
#pragma once

#include <future>

#include "harness/cluster.h"

namespace horoplug::testing {

class Stop {
 public:
  // Returns when the engine of `rank` has stopped, without other ranks.
  void now(Engine& engine, int rank) {
    Order order;
    order.op = OpKind::kReceive;
    order.shape = {1};
    order.root = rank;
    order.output = &received_;
    when_done(engine, submit(engine, order));
    order.op = OpKind::kSend;
    order.output = nullptr;
    order.input = &sent_;
    submit(engine, order);
    await_stopped();
  }
  // Stops it when an operation is done, which it cannot be yet.
  void when_done(Engine& engine, hp_handle handle) {
    engine.on_done(handle, [](void* stop) { static_cast<Stop*>(stop)->hold(); }, this);
  }
  void await_stopped() { stopped_.get_future().wait(); }
  void release() { released_.set_value(); }

 private:
  void hold() {
    const std::future<void> released = released_.get_future();
    stopped_.set_value();
    released.wait();
  }
  std::promise<void> stopped_, released_;
  float sent_ = 1, received_ = 0;
};

}  // namespace horoplug::testing
