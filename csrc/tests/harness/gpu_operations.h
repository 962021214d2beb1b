// Runs operations of all kinds on the GPUs of a GpuJob, and the same operations on the CPU.
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

// One rank's part of an operation.
struct RankOperation {
  Order order;
  std::vector<std::byte> input;
};

// The range of the number of elements per tensor and rank.
struct Elements {
  std::size_t least, most;
};

// Submits a rank's part of an operation on the rank's GPU, and waits for its result.
class InFlight {
 public:
  InFlight(GpuJob& job, int rank, const RankOperation& part, bool in_place)
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
  ~InFlight() {
    if (!failed_) engine_.handles().release(handle_);
  }

  // Waits until all work of the operation is enqueued, and orders the framework's stream after it.
  void wait() {
    failed_ = true;  // await() releases the handle of a failed operation
    await(engine_, handle_);
    failed_ = false;
    RankGpu::make_stream_wait(*engine_.handles().done(handle_), framework_.stream());
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

// Runs `count` random operations, `at_once` of them concurrently, and checks that each has the same
// result as on the CPU.
void run_random(GpuJob& job, int count, int at_once, Elements elements);

// The result of the operation on the CPU.
std::vector<std::byte> on_cpu(Engine& engine, const RankOperation& part);

// An allreduce (sum) of `count` floats, all equal to `value`.
RankOperation sum(const std::string& name, std::size_t count, float value);
// Whether a sum over all `ranks` ranks of a set, which all call this, is correct; 0: all ranks of
// the job.
bool sum_is_correct(GpuJob& job, int rank, const std::string& name, std::size_t count = 500,
                    std::uint32_t set = 0, int ranks = 0);

// Runs steps of the same sums, so that plans are installed. In every eighth step each rank submits
// in an order of its own, which breaks the plan.
void break_plans(GpuJob& job, int steps);

// The number of waits of streams for streams of other ranks, which only CUDA IPC enqueues.
std::size_t count_peer_waits(GpuJob& job);

// Faults for GpuJobOptions::driver.
// Replaces IpcOpenMemHandle and always fails.
CUresult refuse_to_open(CUdeviceptr*, CUipcMemHandle, unsigned);
// After intercept_flag_writes(api), streams do not signal their progress to other ranks while
// `drop_flag_writes` is true. All ranks must have the same functions in `api`.
extern std::atomic<bool> drop_flag_writes;
void intercept_flag_writes(cuda::DriverApi& api);

// The number of occurrences of `part` in `text`.
std::size_t count_of(const std::string& part, const std::string& text);

}  // namespace horoplug::testing
