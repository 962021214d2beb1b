// Tasks that run by turns within one coroutine, so that one moves data in memory while another
// waits for the network:
//
//     Together both;
//     both.add(first(...));
//     both.add(second(...));
//     while (!both.done()) co_await both;
#pragma once

#include <algorithm>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "base/task.h"

namespace horoplug {

// The wait ends whenever a task has advanced, and throws what a task has thrown. The tasks that
// have not ended are destroyed with this object.
class Together final : public Waitable {
 public:
  void add(Task task) { running_.push_back(std::make_unique<Fiber>(std::move(task))); }
  bool done() const { return running_.empty(); }

  bool ready() override {
    bool advanced = running_.empty();
    try {
      std::erase_if(running_, [&](const std::unique_ptr<Fiber>& fiber) {
        const bool ended = fiber->poll();
        advanced |= ended || fiber->advanced();
        return ended;
      });
    } catch (...) {
      failure_ = std::current_exception();
      return true;
    }
    return advanced;
  }
  void finish() override {
    if (failure_) std::rethrow_exception(failure_);
  }
  void blame(std::vector<int>& ranks) const override {
    for (const auto& fiber : running_) {
      const std::vector<int> more = fiber->blame();
      ranks.insert(ranks.end(), more.begin(), more.end());
    }
  }
  bool polled() const override {
    return std::ranges::any_of(running_, [](const auto& fiber) { return fiber->polled(); });
  }

 private:
  std::vector<std::unique_ptr<Fiber>> running_;
  std::exception_ptr failure_;
};

// Waits until another task of the same Together has raised a counter to `least`. That task knows
// the ranks that the wait depends on.
class Raised final : public Waitable {
 public:
  Raised(const std::size_t& counter, std::size_t least) : counter_(counter), least_(least) {}
  bool ready() override { return counter_ >= least_; }
  void blame(std::vector<int>&) const override {}

 private:
  const std::size_t& counter_;
  const std::size_t least_;
};

}  // namespace horoplug
