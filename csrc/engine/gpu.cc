// Tensors on GPUs: the rank's card, what is under way on it, and how it all ends. What their
// batches do is in run_batch.cc and the algorithms.
#include <algorithm>
#include <bit>
#include <limits>

#include "collectives/gpu_group.h"
#include "engine/engine.h"

namespace horoplug {

void Deleter::operator()(void* data) const {
  if (!card) return std::free(data);
  try {
    card->release(std::bit_cast<CUdeviceptr>(data), stream);
  } catch (const Error&) {
    // The card has failed, and its memory is gone with it. (The log may be gone, too.)
  }
}

// ---- called by any thread ----

std::shared_ptr<cuda::Card> Engine::card(int ordinal) {
  std::lock_guard lock(card_mutex_);
  if (card_ && (ordinal < 0 || ordinal == card_->ordinal())) return card_;
  if (card_) {
    throw Error(HP_INVALID_ARGUMENT,
                "the tensor is on cuda:" + std::to_string(ordinal) +
                    ", and this rank's others are "
                    "on cuda:" +
                    std::to_string(card_->ordinal()) +
                    "; a rank has one GPU: torch.cuda.set_device(hvd.local_rank()), for example");
  }
  if (!config_.toolkit) throw Error(HP_UNSUPPORTED, "tensors on a GPU cannot be used here");
  const auto toolkit = config_.toolkit();
  if (ordinal < 0) {
    int count = 0;
    cuda::check(toolkit->driver, toolkit->driver.DeviceGetCount(&count), "cuDeviceGetCount");
    ordinal = config_.options.local_rank % std::max(count, 1);
  }
  card_ = cuda::Card::open(toolkit, ordinal, log_);
  return card_;
}

void Engine::mark_ready(std::span<const OperationPtr> operations) {
  const Operation::Gpu* last = nullptr;
  for (const OperationPtr& operation : operations) {
    Operation::Gpu& gpu = operation->gpu;
    if (gpu.ordinal < 0) continue;
    gpu.card = card(gpu.ordinal);
    gpu.ready =
        last != nullptr && last->stream == gpu.stream ? last->ready : gpu.card->mark(gpu.stream);
    last = &gpu;
  }
}

void Engine::make_stream_wait(hp_handle handle, CUstream stream) {
  const OperationPtr operation = handles_.done(handle);
  if (!operation->status.ok()) throw Error(operation->status.code, operation->status.message);
  const Operation::Gpu& gpu = operation->gpu;
  if (gpu.finished) gpu.card->make_wait(stream, *gpu.finished);
}

// ---- whoever drives ----

bool Engine::gpu_is_busy() const {
  bool busy = false;
  for (const auto& [id, set] : sets_) busy |= set->executor.gpu_is_busy();
  return busy;
}

// See GpuGroup::over().
bool Engine::gpus_are_over() {
  bool over = true;
  for (auto& [id, set] : sets_) {
    GpuGroup* const gpu = set->executor.gpu();
    if (gpu != nullptr) over &= gpu->over();
  }
  return over;
}

void Engine::watch_gpus() {
  const double limit = config_.options.data_timeout;
  for (auto& [id, set] : sets_) {
    if (GpuGroup* gpu = set->executor.gpu()) {
      gpu->watch(now(), limit < 0 ? std::numeric_limits<double>::infinity() : limit);
    }
  }
}

void Engine::abort_gpus() {
  for (auto& [id, set] : sets_) {
    GpuGroup* const gpu = set->executor.gpu();
    if (gpu == nullptr) continue;
    if (const std::string what = gpu->unfinished(); !what.empty()) {
      log_(LogLevel::kError, "results of " + what +
                                 " may be wrong: the job failed before the GPU "
                                 "had come to their end");
    }
    gpu->abort();
  }
}

}  // namespace horoplug
