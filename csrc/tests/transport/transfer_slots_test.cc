// Tests of the slots for transfers between ranks of one host, without engines.
#include "transport/shm/transfer_slots.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <thread>

#include "collectives/point_to_point.h"
#include "harness/cluster.h"

using namespace horoplug;
using namespace horoplug::testing;

TEST_CASE("a slot pool never lends a slot twice and reuses returned slots") {
  SlotPool pool;
  std::mt19937_64 random(test_seed());
  std::vector<std::vector<std::uint32_t>> loans;
  std::set<std::uint32_t> lent;
  for (int i = 0; i < 2000; ++i) {
    if (random() % 2 == 0) {
      const std::size_t wanted = 1 + random() % 5, available = pool.available();
      loans.push_back(pool.take(wanted));
      CHECK(loans.back().size() == std::min(wanted, available));
      for (const std::uint32_t slot : loans.back()) {
        CHECK(slot < TransferSlots::kSlots);
        CHECK(lent.insert(slot).second);
      }
    } else if (!loans.empty()) {
      std::swap(loans[random() % loans.size()], loans.back());
      for (const std::uint32_t slot : loans.back()) lent.erase(slot);
      pool.give_back(loans.back());
      loans.pop_back();
    }
    CHECK(pool.available() == TransferSlots::kSlots - lent.size());
  }
}

TEST_CASE("tensors of any size are transferred through any number of new or reused slots") {
  const std::uint64_t seed = test_seed();
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  const Segment segment = Segment::allocate(TransferSlots::kEnd);
  const TransferSlots memory(segment);
  const auto bell = std::make_shared<Doorbell>();
  SlotPool pool;
  for (int round = 0; round < (kSlowedDown ? 30 : 200); ++round) {
    const std::size_t bytes = random() % (round % 10 == 0 ? 3'000'000 : 100'000);
    const std::vector<std::uint32_t> slots = pool.take(1 + random() % slots_wanted(bytes));
    SlotLoan sender(memory, slots, 1, bell), receiver(memory, slots, 0, bell);
    receiver.begin();
    std::vector<std::byte> sent(bytes), got(bytes);
    for (std::byte& byte : sent) byte = static_cast<std::byte>(random());
    const auto run = [](Task task) {
      Fiber fiber(std::move(task));
      while (!fiber.poll()) std::this_thread::yield();
    };
    std::thread other([&] { run(send_direct(sender, sent.data(), bytes)); });
    run(receive_direct(receiver, got.data(), bytes));
    other.join();
    CHECK(got == sent);
    pool.give_back(slots);
  }
}

TEST_CASE("the path of a transfer depends on its size, memory and devices") {
  const auto path_of = [](TransferProperties properties) {
    return std::string(fits_into_offer(properties) ? kInlinePath.name
                                                   : choose_path(properties).name);
  };
  constexpr std::size_t kLarge = 1 << 20;
  CHECK(path_of({.bytes = 4}) == "inline");
  CHECK(path_of({.bytes = 4, .to_itself = true}) == "copy");
  CHECK(path_of({.bytes = 4, .shares_memory = true, .forced = "direct"}) == "direct");
  CHECK(path_of({.bytes = 4, .shares_memory = true, .forced = "stream"}) == "stream");
  CHECK(path_of({.bytes = 4, .on_gpu = true}) == "stream");
  CHECK(path_of({.bytes = 64 << 10, .shares_memory = true}) == "stream");
  CHECK(path_of({.bytes = 64 << 10, .shares_memory = true, .forced = "direct"}) == "direct");
  CHECK(path_of({.bytes = kLarge}) == "stream");
  CHECK(path_of({.bytes = kLarge, .forced = "direct"}) == "stream");
  CHECK(path_of({.bytes = kLarge, .shares_memory = true}) == "direct");
  CHECK(path_of({.bytes = kLarge, .shares_memory = true, .forced = "ring"}) == "direct");
  CHECK(path_of({.bytes = kLarge, .shares_memory = true, .forced = "stream"}) == "stream");
  CHECK(path_of({.bytes = kLarge, .shares_memory = true, .on_gpu = true}) == "stream");
}
