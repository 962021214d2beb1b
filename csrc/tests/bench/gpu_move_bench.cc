// Compares the speed of the kernels that pack and unpack a batch with that of device-to-device
// copies, and measures the host time of a launch. benchmarks/gpu.py prints the results as a table.
//
//   gpu_move_bench [libraries of CUDA to try ...] < lists
//
// Each line of `lists` has a name and the numbers of float32 elements of a batch's tensors. The
// output line has the name, then the bytes read and written per second when packing (with scaling),
// unpacking and copying, and the CPU time of a launch in microseconds.
//
// The cases alternate within one run; results are medians over the rounds.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <functional>
#include <iostream>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include "base/status.h"
#include "device/cuda/driver/toolkit.h"
#include "device/cuda/runtime/launcher.h"

namespace {

using namespace horoplug;
using namespace horoplug::cuda;

constexpr int kRounds = 11;
constexpr int kLaunches = 40;  // per round: enough that the GPU takes longer than the host

double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

struct Case {
  std::function<void()> launch;
  std::vector<double> seconds{};  // the time of a launch until the GPU is done
  std::vector<double> host{};     // the CPU time of a launch
};

void time(Case& of, const Stream& stream) {
  stream.synchronize();
  const auto begin = std::chrono::steady_clock::now();
  const double cpu_begin = cpu_seconds();
  for (int i = 0; i < kLaunches; ++i) of.launch();
  of.host.push_back((cpu_seconds() - cpu_begin) / kLaunches);
  stream.synchronize();
  const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin;
  of.seconds.push_back(passed.count() / kLaunches);
}

void measure(const Context& context, Launcher& launcher, const std::string& name,
             const std::vector<std::uint64_t>& counts) {
  std::vector<std::uint64_t> sizes;
  for (const std::uint64_t count : counts) sizes.push_back(count * sizeof(float));
  const FusedLayout layout = lay_out(sizes);
  const DeviceMemory tensors(context, layout.bytes);
  const DeviceMemory buffer(context, layout.bytes);
  std::vector<Transfer> pack;
  std::vector<Transfer> unpack;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    pack.push_back(
        {tensors.address() + layout.offsets[i], buffer.address() + layout.offsets[i], counts[i]});
    unpack.push_back({pack.back().to, pack.back().from, counts[i]});
  }
  const Stream& stream = launcher.stream();
  const auto move = [&](const std::vector<Transfer>& transfers, double multiply) {
    launcher.move(DType::kFloat32, DType::kFloat32, Finish{.multiply = multiply}, transfers);
  };
  std::vector<Case> cases;
  cases.push_back({[&] { move(pack, 0.5); }});
  cases.push_back({[&] { move(unpack, 1.0); }});
  cases.push_back({[&] {
    const Current current(context);
    context.check(context.api().MemcpyDtoDAsync(buffer.address(), tensors.address(), layout.bytes,
                                                stream.handle()),
                  "cuMemcpyDtoDAsync");
  }});
  for (Case& one : cases) one.launch();  // compiles
  for (int round = 0; round < kRounds; ++round) {
    for (Case& one : cases) time(one, stream);
  }
  std::printf("%s", name.c_str());
  for (const Case& one : cases) {
    std::printf(" %.6g", 2 * static_cast<double>(layout.bytes) / median(one.seconds));
  }
  std::printf(" %.3f\n", 1e6 * median(cases[0].host));
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const auto toolkit = open_toolkit({{argv + 1, argv + argc}, true});
    const Context context(toolkit->driver, 0);
    Launcher launcher(context, toolkit->images);
    for (std::string line; std::getline(std::cin, line);) {
      std::istringstream words(line);
      std::string name;
      words >> name;
      std::vector<std::uint64_t> counts;
      for (std::uint64_t count = 0; words >> count;) counts.push_back(count);
      if (!counts.empty()) measure(context, launcher, name, counts);
    }
  } catch (const Error& error) {
    std::fprintf(stderr, "gpu_move_bench: %s\n", error.what());
    return 1;
  }
  return 0;
}
