// Containers that keep memory: what they hold, and that they allocate no more than they should.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/inline_vector.h"
#include "base/pool_allocator.h"
#include "base/task.h"

using namespace horoplug;

TEST_CASE("an inline vector holds its elements inside and outside of itself") {
  const auto counted = std::make_shared<int>(7);
  {
    InlineVector<std::shared_ptr<int>, 2> vector;
    CHECK(vector.empty());
    for (std::size_t size = 1; size <= 9; ++size) {
      vector.push_back(counted);
      CHECK(vector.size() == size);
      const auto* const inside = reinterpret_cast<const std::byte*>(&vector);
      const auto* const at = reinterpret_cast<const std::byte*>(&vector.front());
      CHECK((at >= inside && at < inside + sizeof vector) == (size <= 2));
      CHECK(counted.use_count() == static_cast<long>(size) + 1);
      for (const auto& element : vector) CHECK(*element == 7);
    }
    vector.clear();
    CHECK(vector.empty());
    CHECK(counted.use_count() == 1);
    vector = {counted, nullptr, counted};
    CHECK(vector.size() == 3);
    CHECK(vector[1] == nullptr);
    CHECK(vector[2] == counted);
  }
  CHECK(counted.use_count() == 1);
}

TEST_CASE(
    "an inline vector is copied and moved, whether its elements are inside or outside of it") {
  const auto counted = std::make_shared<int>(7);
  for (std::size_t size = 0; size <= 5; ++size) {
    InlineVector<std::shared_ptr<int>, 2> first;
    for (std::size_t i = 0; i < size; ++i) first.push_back(counted);
    const InlineVector<std::shared_ptr<int>, 2> copy(first);
    CHECK(copy.size() == size);
    CHECK(counted.use_count() == static_cast<long>(2 * size) + 1);
    InlineVector<std::shared_ptr<int>, 2> moved(std::move(first));
    CHECK(moved.size() == size);
    // It is empty and can be used again.
    CHECK(first.empty());      // NOLINT(*-use-after-move,*Move)
    first.push_back(nullptr);  // NOLINT(*Move)
    for (std::size_t other = 0; other <= 5; ++other) {
      InlineVector<std::shared_ptr<int>, 2> target;
      target.reserve(other);
      for (std::size_t i = 0; i < other; ++i) target.push_back(counted);
      target = std::move(moved);
      CHECK(target.size() == size);
      CHECK(counted.use_count() == static_cast<long>(2 * size) + 1);
      moved = target;
      CHECK(moved.size() == size);
    }
    for (const auto& element : moved) CHECK(element == counted);
  }
  CHECK(counted.use_count() == 1);
}

namespace {

struct Owner {
  FrameMemory& frame_memory() { return memory; }
  FrameMemory memory;
};

template <std::size_t kBytes>
Task add_ones(Owner&, std::size_t& sum) {
  const std::array<char, kBytes> ones{1};
  sum += static_cast<std::size_t>(ones[0]);
  co_return;
}

}  // namespace

TEST_CASE("the memory of a frame is used for the next one of about its size") {
  FrameMemory memory;
  const auto address = [](void* frame) { return std::bit_cast<std::uintptr_t>(frame); };
  void* const first = memory.take(100);
  const std::uintptr_t place = address(first);
  FrameMemory::give(first, 100);
  void* const larger = memory.take(300);
  CHECK(address(larger) != place);
  void* const second = memory.take(110);
  CHECK(address(second) == place);
  FrameMemory::give(larger, 300);
  FrameMemory::give(second, 110);
  FrameMemory::give(memory.take(100'000), 100'000);  // is not kept
  FrameMemory::give(FrameMemory::take_elsewhere(100), 100);
}

TEST_CASE("coroutines take their frames from the memory of their first argument") {
  Owner owner;
  std::size_t sum = 0;
  for (int i = 0; i < 3; ++i) {
    Fiber small(add_ones<100>(owner, sum));
    CHECK(small.poll());
    Fiber large(add_ones<100'000>(owner, sum));
    CHECK(large.poll());
  }
  CHECK(sum == 6);
}

TEST_CASE("a hash table with a pool uses the memory of erased elements again") {
  using Pair = std::pair<const int, std::string>;
  std::unordered_map<int, std::string, std::hash<int>, std::equal_to<>, PoolAllocator<Pair>> table;
  std::vector<const void*> first, second;
  for (int round = 0; round < 2; ++round) {
    auto& addresses = round == 0 ? first : second;
    for (int i = 0; i < 100; ++i) {
      addresses.push_back(&*table.emplace(i, std::string(40, 'x')).first);
    }
    for (int i = 0; i < 100; ++i) CHECK(table.erase(i) == 1);
  }
  std::ranges::sort(first);
  std::ranges::sort(second);
  CHECK(first == second);
}
