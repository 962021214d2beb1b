#include "tests/host_grid.h"

#include <algorithm>
#include <numeric>
#include <thread>
#include <vector>

#include "device/cuda/kernels/adasum.h"
#include "device/cuda/kernels/list.h"
#include "device/cuda/kernels/move.h"
#include "device/cuda/kernels/reduce.h"

namespace horoplug::testing {
namespace {

using namespace horoplug::cuda;

constexpr std::size_t kWorkers = 3;

struct HostKernel {
  const char* name;
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

#define HOST_MOVE(name, From, To) {#name, run<Move<From, To>, MoveArgs>},
#define HOST_REDUCE(name, Element, Op) {#name, run<Reduce<Element, Op>, ReduceArgs>},
#define HOST_DOTS(name, Element) {#name, run_with_scratch<DotsOf<Element>, DotsArgs>},
#define HOST_SUM(name) {#name, run_with_scratch<SumOfTiles, SumArgs>},
#define HOST_BLEND(name, From, To) {#name, run<Blend<From, To>, BlendArgs>},
constexpr HostKernel kKernels[] = {
    HOROPLUG_GPU_KERNELS(HOST_MOVE, HOST_REDUCE, HOST_DOTS, HOST_SUM, HOST_BLEND)};

}  // namespace

bool run_on_host(const std::string& kernel, const void* args, std::uint32_t blocks,
                 std::mt19937_64& random) {
  const auto* const found = std::find_if(std::begin(kKernels), std::end(kKernels),
                                         [&](const HostKernel& k) { return k.name == kernel; });
  if (found == std::end(kKernels)) return false;
  std::vector<std::uint32_t> order(blocks);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  const auto thread_order = static_cast<std::uint32_t>(random() % kThreads);
  const auto work = [&](std::size_t worker) {
    for (std::size_t i = worker; i < order.size(); i += kWorkers) {
      found->run(Block(order[i], blocks, thread_order), args);
    }
  };
  std::vector<std::thread> others;
  for (std::size_t worker = 1; worker < std::min<std::size_t>(kWorkers, blocks); ++worker) {
    others.emplace_back(work, worker);
  }
  work(0);
  for (std::thread& other : others) other.join();
  return true;
}

}  // namespace horoplug::testing
