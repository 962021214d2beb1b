// Tasks that run by turns within one coroutine.
#include "collectives/together.h"

#include <doctest/doctest.h>

#include <stdexcept>

using namespace horoplug;

namespace {

// Ready when the test says so.
class Signal final : public Waitable {
 public:
  explicit Signal(int rank) : rank_(rank) {}
  bool ready() override { return is_ready; }
  void blame(std::vector<int>& ranks) const override { ranks.push_back(rank_); }
  bool is_ready = false;

 private:
  const int rank_;
};

Task wait_for(Signal& signal, std::size_t& counter) {
  co_await signal;
  ++counter;
}

Task wait_for_both(Signal& signal, std::size_t& counter, std::size_t& ended) {
  co_await Raised(counter, 1);
  co_await signal;
  ++ended;
}

Task fail_after(Signal& signal) {
  co_await signal;
  throw std::runtime_error("failed");
}

Task run_together(std::vector<Task>& tasks) {
  Together together;
  for (Task& task : tasks) together.add(std::move(task));
  while (!together.done()) co_await together;
}

}  // namespace

TEST_CASE("tasks that run together advance while others wait, and all ranks waited for are named") {
  Signal first(1);
  Signal second(2);
  std::size_t counter = 0;
  std::size_t ended = 0;
  std::vector<Task> tasks;
  tasks.push_back(wait_for(first, counter));
  tasks.push_back(wait_for_both(second, counter, ended));
  tasks.push_back(wait_for(second, counter));
  Fiber fiber(run_together(tasks));
  CHECK(!fiber.poll());
  CHECK(fiber.blame() == std::vector{1, 2});
  second.is_ready = true;
  CHECK(!fiber.poll());
  CHECK(fiber.advanced());
  CHECK(counter == 1);
  CHECK(ended == 1);
  CHECK(fiber.blame() == std::vector{1});
  CHECK(!fiber.poll());
  CHECK(!fiber.advanced());
  first.is_ready = true;
  CHECK(fiber.poll());
  CHECK(counter == 2);
}

TEST_CASE("a task that fails ends those that run together with it") {
  Signal never(1);
  Signal soon(2);
  std::size_t counter = 0;
  std::vector<Task> tasks;
  tasks.push_back(wait_for(never, counter));
  tasks.push_back(fail_after(soon));
  Fiber fiber(run_together(tasks));
  CHECK(!fiber.poll());
  soon.is_ready = true;
  CHECK_THROWS_WITH(fiber.poll(), "failed");
  CHECK(counter == 0);
}
