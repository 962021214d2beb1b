// Containers that keep memory: what they hold, and that they allocate no more than they should.
#include <doctest/doctest.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/inline_vector.h"
#include "base/pool_allocator.h"

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
