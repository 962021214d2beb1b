#include "engine/rank_gpu.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "collectives/gpu/gpu_group.h"

namespace horoplug {

// ---- called by any thread ----

std::shared_ptr<cuda::Device> RankGpu::device(int ordinal) {
  std::lock_guard lock(mutex_);
  if (device_ && (ordinal < 0 || ordinal == device_->ordinal())) return device_;
  if (device_) {
    throw Error(HP_INVALID_ARGUMENT,
                "the tensor is on cuda:" + std::to_string(ordinal) +
                    ", and this rank's others are on cuda:" + std::to_string(device_->ordinal()) +
                    "; a rank has one GPU: make it the current device, or the only one in "
                    "CUDA_VISIBLE_DEVICES");
  }
  if (!config_.toolkit) throw Error(HP_UNSUPPORTED, "tensors on a GPU cannot be used here");
  const auto toolkit = config_.toolkit();
  if (ordinal < 0) {
    int count = 0;
    cuda::check(toolkit->driver, toolkit->driver.DeviceGetCount(&count), "cuDeviceGetCount");
    ordinal = config_.options.local_rank % std::max(count, 1);
  }
  device_ = cuda::Device::open(toolkit, ordinal, config_.log);
  return device_;
}

void RankGpu::mark_ready(std::span<const OperationPtr> operations) {
  const Operation::Gpu* last = nullptr;
  for (const OperationPtr& operation : operations) {
    Operation::Gpu& gpu = operation->gpu;
    if (gpu.ordinal < 0) continue;
    gpu.device = device(gpu.ordinal);
    if (last != nullptr && last->stream == gpu.stream) {
      gpu.ready = last->ready;
    } else {
      gpu.device->refuse_capture(gpu.stream);
      gpu.ready = gpu.device->mark(gpu.stream);
    }
    last = &gpu;
  }
}

void RankGpu::make_stream_wait(const Operation& operation, CUstream stream) {
  if (!operation.status.ok()) throw Error(operation.status.code, operation.status.message);
  const Operation::Gpu& gpu = operation.gpu;
  if (gpu.finished) gpu.device->make_wait(stream, *gpu.finished);
}

void RankGpu::copy_result(const Operation& operation, int index, void* to, CUstream stream) {
  make_stream_wait(operation, stream);
  const TensorOutcome& outcome = operation.outcome(index);
  const auto bytes = static_cast<std::size_t>(outcome.bytes);
  if (bytes == 0) return;
  if (const auto& device = operation.gpu.device) {
    device->copy(std::bit_cast<CUdeviceptr>(to), std::bit_cast<CUdeviceptr>(outcome.data), bytes,
                 stream);
  } else {
    std::memcpy(to, outcome.data, bytes);
  }
}

// ---- the thread that runs the loop ----

bool RankGpu::is_busy() const {
  return std::ranges::any_of(registry_.sets(),
                             [](const ProcessSet& set) { return set.executor().gpu_is_busy(); });
}

bool RankGpu::waits_for_framework() const {
  return std::ranges::any_of(registry_.gpus(), &GpuGroup::has_not_begun);
}

// CUDA's driver may block the calling thread until the GPU has done its work (when it loads a
// kernel, for example), and that work waits for other ranks. So the messages that they need must
// have left before. (What an algorithm sends has left when it ends.)
//
// Batches of the global set that were decided before other sets existed take no turns; they run
// first.
bool RankGpu::may_start(std::uint32_t set) {
  if (set != 0 && registry_.global().executor().has_gpu_batches_without_turns()) return false;
  mesh_.pump_writes();
  return mesh_.control_has_left();
}

bool RankGpu::is_over() const {
  bool over = registry_.removed().empty();
  for (GpuGroup* const gpu : registry_.gpus()) over &= gpu->over();
  return over;
}

void RankGpu::abort() {
  std::vector<GpuGroup*> groups = registry_.gpus();
  for (GpuGroup* const gpu : groups) {
    if (const std::string what = gpu->unfinished(); !what.empty()) {
      config_.log(
          LogLevel::kError,
          "results of " + what + " may be wrong: the job failed before the GPU had finished them");
    }
  }
  for (const auto& set : registry_.removed()) {
    if (GpuGroup* const gpu = set->executor().gpu()) groups.push_back(gpu);
  }
  GpuGroup::abort(groups);
}

}  // namespace horoplug
