#include "tests/harness/host_grid.h"

#include <algorithm>
#include <numeric>
#include <thread>
#include <vector>

#include "device/cuda/kernels/adasum.h"
#include "device/cuda/kernels/move.h"
#include "device/cuda/kernels/reduce.h"

namespace horoplug::testing {
namespace {

using namespace horoplug::cuda;

struct HostKernel {
  const char* name;
  std::size_t args_bytes;
  void (*run)(const Block& block, const void* args);
};

template <class Kernel, class Args>
void run(const Block& block, const void* args) {
  Kernel::run(block, *static_cast<const Args*>(args));
}
template <class Kernel, class Args>
void run_with_scratch(const Block& block, const void* args) {
  Dots scratch[kThreads];
  Kernel::run(block, *static_cast<const Args*>(args), scratch);
}

constexpr HostKernel kKernels[] = {
#define HP_MOVE(name, From, To) {#name, sizeof(MoveArgs), run<Move<From, To>, MoveArgs>},
#define HP_REDUCE(name, Element, Op) \
  {#name, sizeof(ReduceArgs), run<Reduce<Element, Op>, ReduceArgs>},
#define HP_DOTS(name, Element) \
  {#name, sizeof(DotsArgs), run_with_scratch<DotsOf<Element>, DotsArgs>},
#define HP_SUM(name) {#name, sizeof(SumArgs), run_with_scratch<SumOfTiles, SumArgs>},
#define HP_BLEND(name, From, To) {#name, sizeof(BlendArgs), run<Blend<From, To>, BlendArgs>},
#include "device/cuda/kernels/list.def"
};

const HostKernel* find(const std::string& kernel) {
  const auto* const found = std::find_if(std::begin(kKernels), std::end(kKernels),
                                         [&](const HostKernel& k) { return k.name == kernel; });
  return found == std::end(kKernels) ? nullptr : found;
}

}  // namespace

std::size_t args_bytes(const std::string& kernel) {
  const HostKernel* const found = find(kernel);
  return found == nullptr ? 0 : found->args_bytes;
}

bool run_on_cpu(const std::string& kernel, const void* args, std::uint32_t blocks,
                std::mt19937_64& random, std::size_t threads) {
  const HostKernel* const found = find(kernel);
  if (found == nullptr) return false;
  std::vector<std::uint32_t> order(blocks);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  const auto thread_order = static_cast<std::uint32_t>(random() % kThreads);
  const auto work = [&](std::size_t worker) {
    for (std::size_t i = worker; i < order.size(); i += threads) {
      found->run(Block(order[i], blocks, thread_order), args);
    }
  };
  std::vector<std::thread> others;
  for (std::size_t worker = 1; worker < std::min<std::size_t>(threads, blocks); ++worker) {
    others.emplace_back(work, worker);
  }
  work(0);
  for (std::thread& other : others) other.join();
  return true;
}

}  // namespace horoplug::testing
