// Stress tests of the progress loop alone: callers and submitters contend for a loop with simulated
// work. A lost wake-up shows as a wait that does not end, because the work sets no time limit
// unless a test needs one.
#include <doctest/doctest.h>
#include <poll.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "engine/loop/progress_loop.h"
#include "harness/cluster.h"
#include "transport/doorbell.h"
#include "transport/mesh.h"

using namespace horoplug;
using horoplug::testing::kSlowedDown;
using horoplug::testing::test_seed;

namespace {

constexpr Seconds kTimeout{30};  // no wait of a passing test takes so long

// The values that Doorbell writes to its word.
constexpr std::uint32_t kAsleep = 1, kResting = 2;

// Polls until `condition()` holds, for at most kTimeout; returns whether it holds.
template <typename Condition>
bool eventually(const Condition& condition) {
  const SteadyTime end = steady_now() + kTimeout;
  while (!condition()) {
    if (steady_now() >= end) return false;
    std::this_thread::yield();
  }
  return true;
}

// One item of work. It is done when the loop has seen `flag`.
struct Ticket {
  std::atomic<bool> flag{false};
  std::atomic<bool> done{false};
};
using TicketPtr = std::shared_ptr<Ticket>;

// The simulated work of a loop. Each step serves the pending tickets whose flags are set.
class TicketWork {
 public:
  explicit TicketWork(Doorbell& doorbell) : doorbell_(doorbell) {}

  // ---- any thread

  TicketPtr submit(bool wakes = true, bool flag = false) {
    auto ticket = std::make_shared<Ticket>();
    ticket->flag = flag;
    {
      std::lock_guard lock(mutex_);
      submitted_.push_back(ticket);
      requests_.store(true);
    }
    if (wakes) doorbell_.ring();
    return ticket;
  }
  // Acts like a peer that sets a flag in shared memory.
  void set_flag(Ticket& ticket) {
    ticket.flag.store(true);
    full_fence();
    doorbell_.ring_unless_resting();
  }
  void stop() {
    {
      std::lock_guard lock(mutex_);
      stop_requested_ = true;
      requests_.store(true);
    }
    doorbell_.ring();
  }
  void sleep(const Ticket& ticket, Seconds time) {
    std::unique_lock lock(done_mutex_);
    sleepers_.fetch_add(1);
    done_.wait_for(lock, time, [&] { return ticket.done.load(); });
    sleepers_.fetch_sub(1);
  }

  // ---- what the loop calls

  bool step() {
    CHECK(!inside_.exchange(true));  // only one thread may run the loop
    ++steps;
    bool busy = false;
    if (requests_.load()) {
      std::lock_guard lock(mutex_);
      pending_.insert(pending_.end(), submitted_.begin(), submitted_.end());
      submitted_.clear();
      stopped_ |= stop_requested_;
      requests_.store(false);
      busy = true;
    }
    const auto end = [&](const TicketPtr& ticket) {
      if (!stopped_ && !ticket->flag.load()) return false;
      {
        std::lock_guard lock(done_mutex_);
        ticket->done.store(true);
      }
      done_.notify_all();
      quiet_since_ = steady_now();
      return busy = true;
    };
    std::erase_if(pending_, end);
    inside_.store(false);
    if (throws.exchange(false)) throw std::runtime_error("broken");
    return busy;
  }
  void watch() { ++watches; }
  void fail(const Status& status) {
    failure = status;
    stopped_ = true;
  }
  bool stopped() const { return stopped_; }
  bool requests_waiting() const { return requests_.load(); }
  bool has_running_batch() const { return !pending_.empty(); }
  bool has_sleeping_callers() const { return sleepers_.load() > 0; }
  static bool has_callbacks() { return false; }
  bool must_poll() const { return false; }
  SteadyTime quiet_since() const { return quiet_since_; }
  // A loop without tickets may rest. With tickets, the interval of watch() is so long that a test
  // which depends on it fails.
  Seconds sleep_time() const { return pending_.empty() ? kForever : watch_every.load(); }
  Seconds watch_interval() const { return watch_every; }

  std::atomic<Seconds> watch_every{10 * kTimeout};
  std::atomic<bool> throws{false};
  std::atomic<std::uint64_t> steps{0}, watches{0};
  Status failure;

 private:
  Doorbell& doorbell_;
  std::mutex mutex_;
  std::vector<TicketPtr> submitted_;
  bool stop_requested_ = false;
  std::atomic<bool> requests_{false};
  std::mutex done_mutex_;
  std::condition_variable done_;
  std::atomic<int> sleepers_{0};
  std::atomic<bool> inside_{false};
  // Only accessed by the thread that runs the loop.
  std::vector<TicketPtr> pending_;
  bool stopped_ = false;
  SteadyTime quiet_since_;
};

// A rank without peers: a loop and its work.
struct Rank {
  Rank() : work(*doorbell), loop(work, mesh, *doorbell, has_fewer_processors_than(4), 0) {
    doorbell->share_word(&word);
  }
  ~Rank() {
    work.stop();
    loop.join();
  }

  struct Wait {
    Ticket& ticket;
    bool done() const { return ticket.done.load(); }
    bool again() const { return false; }
  };
  // Waits as Engine::wait() does.
  bool wait(Ticket& ticket, Seconds time) {
    Wait wait{ticket};
    if (loop.acquire()) {
      loop.run_until_done(wait, time);
    } else {
      work.sleep(ticket, time);
    }
    return ticket.done.load();
  }

  Doorbell::Word word{0};
  std::shared_ptr<Doorbell> doorbell = std::make_shared<Doorbell>();
  Mesh mesh{std::vector<std::vector<std::unique_ptr<Stream>>>(1), doorbell, {}};
  TicketWork work;
  ProgressLoop<TicketWork> loop;
};

}  // namespace

TEST_CASE("no wake-up is lost when callers, submitters and flags contend for the loop") {
  Rank rank;
  rank.loop.start();
  constexpr int kThreads = 4;
  const int rounds = kSlowedDown ? 500 : 3000;
  std::atomic<int> late{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      std::mt19937_64 random(test_seed() + static_cast<std::uint64_t>(i));
      for (int round = 0; round < rounds && late == 0; ++round) {
        const TicketPtr ticket = rank.work.submit();
        // The flag comes from this thread, or from another one at any time later.
        std::thread peer;
        if (random() % 8 == 0) {
          peer = std::thread([&, spins = random() % 4096] {
            for (std::uint64_t spin = 0; spin < spins; ++spin) spin_pause();
            rank.work.set_flag(*ticket);
          });
        } else {
          rank.work.set_flag(*ticket);
        }
        Seconds left = kTimeout;
        if (random() % 3 == 0) {  // begin with a wait that may be too short
          rank.wait(*ticket, Seconds(std::ldexp(1e-6, static_cast<int>(random() % 10))));
        }
        if (random() % 4 == 0) {  // leave the work to other threads and poll
          for (const SteadyTime end = steady_now() + kTimeout;
               !ticket->done && steady_now() < end;) {
            std::this_thread::yield();
          }
          left = {};
        }
        if (!ticket->done && !(left > Seconds(0) && rank.wait(*ticket, left))) ++late;
        if (peer.joinable()) peer.join();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(late == 0);
}

TEST_CASE("affinity and quota tell whether threads have fewer processors than they need") {
  CHECK_FALSE(has_fewer_processors_than(1));
  CHECK(has_fewer_processors_than(1 << 20));
  CHECK(has_fewer_processors_than(1, 0.5));  // half of the time of one processor
  CHECK_FALSE(has_fewer_processors_than(1, 1.0));
  CHECK(has_fewer_processors_than(1 << 20, 1 << 21));  // a quota adds no processors
}

TEST_CASE("the progress thread serves a submission that no caller waits for") {
  Rank rank;
  rank.loop.start();
  for (int round = 0; round < 200; ++round) {
    const TicketPtr ticket = rank.work.submit();
    // In every other round, the flag is set while the progress thread sleeps with a pending ticket.
    if (round % 2 == 0) REQUIRE(eventually([&] { return rank.word == kAsleep; }));
    rank.work.set_flag(*ticket);
    REQUIRE(eventually([&] { return ticket->done.load(); }));
  }
}

TEST_CASE("after a caller has released the loop, the progress thread checks the deadlines") {
  Rank rank;
  rank.loop.start();
  // The progress thread has no work: once it has released the loop, it sleeps without a time limit.
  REQUIRE(eventually([&] { return rank.word == kResting; }));
  REQUIRE(eventually([&] { return rank.loop.acquire(); }));
  rank.work.watch_every = Seconds(0.05);
  // The ticket's flag is never set, so only watch() runs for it.
  const TicketPtr ticket = rank.work.submit(false);
  Rank::Wait wait{*ticket};
  rank.loop.run_until_done(wait, Seconds(0.01));
  CHECK(!ticket->done);
  const std::uint64_t before = rank.work.watches;
  CHECK(eventually([&] { return rank.work.watches >= before + 3; }));
}

TEST_CASE("a wait with a time limit returns in time, whichever thread holds the loop") {
  Rank rank;
  rank.loop.start();
  const TicketPtr ticket = rank.work.submit();
  std::vector<std::thread> threads;
  std::atomic<int> in_time{0};
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      const SteadyTime begin = steady_now();
      const bool done = rank.wait(*ticket, Seconds(0.05));
      const Seconds waited = steady_now() - begin;
      if (!done && waited >= Seconds(0.049) && waited < kTimeout / 2) ++in_time;
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(in_time == 3);
}

TEST_CASE("an idle loop rests: a submission wakes it once, and flags do not wake it") {
  Rank rank;
  rank.loop.start();
  REQUIRE(eventually([&] { return rank.word == kResting; }));
  for (std::uint64_t round = 1; round <= 20; ++round) {
    const TicketPtr ticket = rank.work.submit(true, true);
    REQUIRE(eventually([&] { return ticket->done && rank.word == kResting; }));
    CHECK(rank.loop.wakeups() == round);
    const std::uint64_t steps = rank.work.steps;
    for (int i = 0; i < 1000; ++i) rank.doorbell->ring_unless_resting();
    CHECK(rank.word == kResting);
    CHECK(rank.work.steps == steps);
  }
}

TEST_CASE("a caller that leaves an idle loop lets it rest") {
  Rank rank;  // no progress thread is started, so that no other thread reads the doorbell
  const auto is_rung = [&] {
    pollfd event{rank.doorbell->fd(), POLLIN, 0};
    return ::poll(&event, 1, 0) == 1;
  };
  const TicketPtr ticket = rank.work.submit(true, true);
  CHECK(rank.wait(*ticket, kTimeout));
  CHECK(rank.word == kResting);
  rank.doorbell->silence();
  rank.doorbell->ring_unless_resting();
  CHECK(!is_rung());
  rank.work.submit();
  CHECK(is_rung());
}

TEST_CASE("an exception in a step fails the work and ends every wait") {
  Rank rank;
  rank.loop.start();
  const TicketPtr ticket = rank.work.submit();
  rank.work.throws = true;
  const SteadyTime end = steady_now() + kTimeout;
  while (rank.work.throws && steady_now() < end) {
    rank.doorbell->ring();
    rank.wait(*ticket, Seconds(1e-3));
  }
  rank.loop.join();
  CHECK(rank.work.stopped());
  CHECK(rank.work.failure.code == HP_INTERNAL);
  CHECK(rank.work.failure.message == "rank 0: internal error: broken");
}
