// Another engine of this process, for the search for deadlocks: ranks may wait for each other in
// different groups. See StallInspector::attach().
//
// Both engines share the object, and each may end first.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "controller/messages/messages.h"
#include "engine/operations/handle_table.h"
#include "transport/doorbell.h"

namespace horoplug {

class AttachedGroup {
 public:
  AttachedGroup(std::string given_name, std::vector<int> given_ranks,
                std::shared_ptr<const HandleTable> table, std::shared_ptr<Doorbell> doorbell)
      : name(std::move(given_name)),
        ranks(std::move(given_ranks)),
        handles(std::move(table)),
        doorbell_(std::move(doorbell)) {}

  const std::string name;
  const std::vector<int> ranks;  // in the engine that searches, by their rank in the group
  const std::shared_ptr<const HandleTable> handles;  // the group's

  // One of the engines has ended.
  void end() { ended_.store(true); }
  bool has_ended() const { return ended_.load(); }

  // The group asks for a search. It does so again as long as an operation waits, so that nothing is
  // lost if the other engine is about to sleep.
  void ask() {
    asked_.store(true);
    if (!ended_) doorbell_->ring();
  }
  bool take_request() { return asked_.load(std::memory_order_relaxed) && asked_.exchange(false); }

  // The search has found a deadlock.
  void call_off(CallOff call_off) {
    std::lock_guard lock(mutex_);
    call_offs_.push_back(std::move(call_off));
    has_call_offs_.store(true);
  }
  // The group's engine takes it while it waits for the operation, and looks a few times per second.
  std::vector<CallOff> take_call_offs() {
    if (!has_call_offs_.load(std::memory_order_relaxed)) return {};
    std::lock_guard lock(mutex_);
    has_call_offs_.store(false);
    return std::exchange(call_offs_, {});
  }

 private:
  const std::shared_ptr<Doorbell> doorbell_;  // of the engine that searches
  std::atomic<bool> ended_{false};
  std::atomic<bool> asked_{false};
  std::atomic<bool> has_call_offs_{false};
  std::mutex mutex_;
  std::vector<CallOff> call_offs_;
};

}  // namespace horoplug
