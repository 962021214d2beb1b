// Tensors on GPUs: the rank's GPU, what is under way on it, and how it all ends. What their
// batches do is in run_batch.cc and the algorithms.
#include <algorithm>
#include <bit>
#include <cstring>
#include <vector>

#include "collectives/gpu/gpu_group.h"
#include "engine/engine.h"

namespace horoplug {

void Deleter::operator()(void* data) const {
  if (!device) return std::free(data);
  try {
    device->release(std::bit_cast<CUdeviceptr>(data), stream);
  } catch (const Error&) {
    // The GPU has failed, and its memory is gone with it. (The log may be gone, too.)
  }
}

// ---- called by any thread ----

std::shared_ptr<cuda::Device> Engine::device(int ordinal) {
  std::lock_guard lock(device_mutex_);
  if (device_ && (ordinal < 0 || ordinal == device_->ordinal())) return device_;
  if (device_) {
    throw Error(
        HP_INVALID_ARGUMENT,
        "the tensor is on cuda:" + std::to_string(ordinal) +
            ", and this rank's others are "
            "on cuda:" +
            std::to_string(device_->ordinal()) +
            "; a rank has one GPU: torch.cuda.set_device(hvd.local_rank()), for example, or "
            "CUDA_VISIBLE_DEVICES");
  }
  if (!config_.toolkit) throw Error(HP_UNSUPPORTED, "tensors on a GPU cannot be used here");
  const auto toolkit = config_.toolkit();
  if (ordinal < 0) {
    int count = 0;
    cuda::check(toolkit->driver, toolkit->driver.DeviceGetCount(&count), "cuDeviceGetCount");
    ordinal = config_.options.local_rank % std::max(count, 1);
  }
  device_ = cuda::Device::open(toolkit, ordinal, log_);
  return device_;
}

void Engine::mark_ready(std::span<const OperationPtr> operations) {
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

void Engine::make_stream_wait(hp_handle handle, CUstream stream) {
  const OperationPtr operation = handles_.done(handle);
  if (!operation->status.ok()) throw Error(operation->status.code, operation->status.message);
  const Operation::Gpu& gpu = operation->gpu;
  if (gpu.finished) gpu.device->make_wait(stream, *gpu.finished);
}

void Engine::copy_result(hp_handle handle, int index, void* to, CUstream stream) {
  make_stream_wait(handle, stream);
  const OperationPtr operation = handles_.done(handle);
  const TensorOutcome& outcome = operation->outcome(index);
  const auto bytes = static_cast<std::size_t>(outcome.bytes);
  if (bytes == 0) return;
  if (const auto& device = operation->gpu.device) {
    device->copy(std::bit_cast<CUdeviceptr>(to), std::bit_cast<CUdeviceptr>(outcome.data), bytes,
                 stream);
  } else {
    std::memcpy(to, outcome.data, bytes);
  }
}

// ---- whoever drives ----

bool Engine::gpu_is_busy() const {
  bool busy = false;
  for (const auto& [id, set] : sets_) busy |= set->executor.gpu_is_busy();
  return busy;
}

bool Engine::gpu_has_not_begun() const {
  return std::any_of(sets_.begin(), sets_.end(), [](const auto& set) {
    const GpuGroup* const gpu = set.second->executor.gpu();
    return gpu != nullptr && gpu->has_not_begun();
  });
}

// CUDA's driver may keep the host until what is on the GPU is done (when it loads a kernel, for
// example), and that waits for other ranks: what they have to hear for it must have left before.
// (What an algorithm sends has left when it ends.)
//
// What the set of all ranks has had to do since before there were others comes before them.
bool Engine::may_turn_to_gpu(std::uint32_t set) {
  if (set != 0 && sets_.at(0)->executor.has_gpu_batches_without_turns()) return false;
  mesh_->pump_writes();
  return mesh_->control_has_left();
}

// See GpuGroup::over().
bool Engine::gpus_are_over() {
  bool over = removed_sets_.empty();
  for (auto& [id, set] : sets_) {
    GpuGroup* const gpu = set->executor.gpu();
    if (gpu != nullptr) over &= gpu->over();
  }
  return over;
}

void Engine::abort_gpus() {
  std::vector<GpuGroup*> groups;
  for (auto& [id, set] : sets_) {
    GpuGroup* const gpu = set->executor.gpu();
    if (gpu == nullptr) continue;
    if (const std::string what = gpu->unfinished(); !what.empty()) {
      log_(LogLevel::kError, "results of " + what +
                                 " may be wrong: the job failed before the GPU "
                                 "had come to their end");
    }
    groups.push_back(gpu);
  }
  for (const auto& set : removed_sets_) {
    if (GpuGroup* const gpu = set->executor.gpu()) groups.push_back(gpu);
  }
  GpuGroup::abort(groups);
}

}  // namespace horoplug
