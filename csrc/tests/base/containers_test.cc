// Containers that keep memory: what they hold, and that they allocate no more than they should.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
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

// Where a variable of the coroutine lies, which is in its frame.
template <std::size_t kBytes>
Task note_address(Owner&, std::vector<const void*>& addresses) {
  std::array<std::byte, kBytes> inside{};
  addresses.push_back(inside.data());
  co_return;
}

Task note_address_without_owner(std::vector<const void*>& addresses) {
  const int inside = 0;
  addresses.push_back(&inside);
  co_return;
}

}  // namespace

TEST_CASE("frames of coroutines use the memory of those that have ended") {
  Owner owner;
  std::vector<const void*> addresses, others;
  for (int i = 0; i < 3; ++i) {
    Fiber fiber(note_address<100>(owner, addresses));
    CHECK(fiber.poll());
    Fiber second(note_address<100>(owner, others));
    CHECK(second.poll());
    Fiber large(note_address<100'000>(owner, others));  // is not kept
    CHECK(large.poll());
    Fiber alone(note_address_without_owner(others));
    CHECK(alone.poll());
  }
  CHECK(std::ranges::count(addresses, addresses.front()) >= 1);
  const auto is_known = [&](const void* address) {
    return address == addresses[0] || address == others[0];
  };
  CHECK(is_known(addresses[1]));
  CHECK(is_known(addresses[2]));
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
