// Compares the speed of the CPU reductions with memcpy, in GB/s of bytes read plus bytes written.
//
//   kernels_bench [bytes per array ...]      (default: a size for each cache level and a larger
//   one)
//
// The cases alternate within one run; results are medians over the rounds.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "device/cpu/kernels.h"

namespace {

using namespace horoplug;

constexpr int kRounds = 21;
constexpr std::size_t kAlignment = 4096;

struct Case {
  std::string name;
  double bytes;  // moved by one call
  std::function<void()> call;
  std::vector<double> seconds{};
};

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

char* make_array(std::size_t bytes, std::size_t index) {
  // Staggered, because arrays at the same offset within a page compete for the same cache sets.
  const std::size_t stagger = index * 320;
  void* memory =
      std::aligned_alloc(kAlignment, (bytes + stagger) / kAlignment * kAlignment + kAlignment);
  if (memory == nullptr) std::abort();
  char* array = static_cast<char*>(memory) + stagger;
  std::memset(array, 0x3c, bytes);  // about 1 in float16, about 0.01 in bfloat16 and float32
  return array;
}

void bench(std::size_t bytes) {
  constexpr int kSources = 16;
  const void* src[kSources];
  for (int i = 0; i < kSources; ++i) src[i] = make_array(bytes, static_cast<std::size_t>(i));
  char* dst = make_array(bytes, kSources);
  std::vector<Case> cases;
  cases.push_back(
      {"memcpy", 2.0 * static_cast<double>(bytes), [=] { std::memcpy(dst, src[0], bytes); }});
  const KernelTables tables = available_kernels();
  for (int t = 0; t < tables.count; ++t) {
    const KernelTable* table = tables.tables[t];
    for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      for (int sources : {2, 4, 16}) {
        for (double divide : {1.0, 4.0, 3.0}) {
          if (divide != 1.0 && sources != 4) continue;
          Case c;
          c.name =
              std::string(table->name) + " " + dtype_name(dtype) + " " + std::to_string(sources);
          if (divide != 1.0) c.name += " / " + std::to_string(static_cast<int>(divide));
          c.bytes = (sources + 1.0) * static_cast<double>(bytes);
          const ReduceFn reduce =
              table->reduce[static_cast<int>(ReduceOp::kSum)][static_cast<int>(dtype)];
          const std::size_t count = bytes / dtype_size(dtype);
          c.call = [=, &src] { reduce(dst, src, sources, count, Finish{1.0, divide}); };
          cases.push_back(c);
        }
      }
    }
  }
  const int repeats = static_cast<int>(std::max<std::size_t>(1, (std::size_t{4} << 20) / bytes));
  for (int round = 0; round < kRounds; ++round) {
    for (Case& c : cases) {
      c.call();  // loads the arrays into the cache again after the other cases
      const auto start = std::chrono::steady_clock::now();
      for (int i = 0; i < repeats; ++i) c.call();
      const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
      c.seconds.push_back(elapsed.count() / repeats);
    }
  }
  std::printf("%zu KiB per array (median and range of %d rounds)\n", bytes / 1024, kRounds);
  double memcpy_speed = 0;
  for (const Case& c : cases) {
    const double speed = c.bytes / median(c.seconds) / 1e9;
    if (memcpy_speed == 0) memcpy_speed = speed;
    std::printf("  %-28s %7.1f GB/s  (%.1f - %.1f)  %5.2f x memcpy\n", c.name.c_str(), speed,
                c.bytes / *std::max_element(c.seconds.begin(), c.seconds.end()) / 1e9,
                c.bytes / *std::min_element(c.seconds.begin(), c.seconds.end()) / 1e9,
                speed / memcpy_speed);
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::size_t> sizes;
  for (int i = 1; i < argc; ++i) sizes.push_back(std::strtoull(argv[i], nullptr, 10));
  if (sizes.empty()) sizes = {8u << 10, 128u << 10, 1u << 20, 32u << 20};
  std::printf("chosen here: %s\n", kernels().name);
  for (std::size_t size : sizes) bench(size);
  return 0;
}
