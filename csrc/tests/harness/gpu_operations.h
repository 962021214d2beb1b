// Operations of all kinds on the GPUs of a GpuJob, next to the same ones on the CPU.
#pragma once

#include <atomic>
#include <cstddef>
#include <string>
#include <vector>

#include "tests/harness/gpu_job.h"

namespace horoplug::testing {

inline constexpr DType kAllDTypes[] = {
#define HP_DTYPE(code, NAME, Name, ...) DType::k##Name,
#include "horoplug/dtypes.def"
};
inline constexpr ReduceOp kReductions[] = {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin,
                                           ReduceOp::kMax, ReduceOp::kProduct};

// An operation as one rank submits it.
struct Submitted {
  Order order;
  std::vector<std::byte> input;
};

// Of tensors, on one rank.
struct Elements {
  std::size_t least, most;
};

// An operation on a rank's GPU that is under way.
class Running {
 public:
  Running(GpuJob& job, int rank, const Submitted& part, bool in_place)
      : framework_(job.framework(rank)),
        engine_(job.engine(rank)),
        from_(framework_, part.input.size()),
        to_(framework_, part.input.size()) {
    from_.write(part.input);
    Order order = part.order;
    order.input = from_.address();
    if (order.op == OpKind::kAllreduce || order.op == OpKind::kBroadcast) {
      order.output = in_place ? from_.address() : to_.address();
    }
    order.device = framework_.device();
    order.stream = framework_.stream();
    handle_ = submit(engine_, order);
  }
  ~Running() {
    if (!failed_) engine_.handles().release(handle_);
  }

  // Until all of it is in streams.
  void wait() {
    failed_ = true;  // await() gives back what fails
    await(engine_, handle_);
    failed_ = false;
    engine_.make_stream_wait(handle_, framework_.stream());
  }
  std::vector<std::byte> result() {
    wait();
    const auto& outcome = engine_.handles().done(handle_)->outcomes.front();
    return framework_.read(std::bit_cast<CUdeviceptr>(outcome.data),
                           static_cast<std::size_t>(outcome.bytes));
  }

 private:
  Framework& framework_;
  Engine& engine_;
  Framework::Array from_, to_;
  hp_handle handle_;
  bool failed_ = false;
};

// Random operations, `at_once` of which are under way at a time, and each of which must give what
// the CPU gives.
void run_random(GpuJob& job, int count, int at_once, Elements elements);

// The operation on the CPU.
std::vector<std::byte> on_cpu(Engine& engine, const Submitted& part);

// Of `count` floats that are all `value`.
Submitted sum(const std::string& name, std::size_t count, float value);
// Whether all ranks of a set, who call this, get the right sum.
bool sums_up(GpuJob& job, int rank, const std::string& name, std::size_t count = 500,
             std::uint32_t set = 0, int ranks = 0);

// Steps of the same sums, which are planned; in some, ranks submit them in different orders, which
// no plan allows for.
void break_plans(GpuJob& job, int steps);

// How often streams have waited for other ranks', as they do with CUDA IPC.
std::size_t waits(GpuJob& job);

// Functions of a driver that does less than it should, for GpuJobOptions::driver.
CUresult refuse_to_open(CUdeviceptr*, CUipcMemHandle, unsigned);
// While `stuck`, streams never say to others where they are. `api` is the same for all ranks.
extern std::atomic<bool> stuck;
void let_stick(cuda::DriverApi& api);

// How often a part is in a text.
std::size_t count_of(const std::string& part, const std::string& text);

}  // namespace horoplug::testing
