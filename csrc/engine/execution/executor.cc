#include "engine/execution/executor.h"

#include <algorithm>

#include "base/hash.h"
#include "collectives/gpu/gpu_group.h"

namespace horoplug {
namespace {

// A hash of the properties of a batch that are the same on all ranks.
std::uint64_t hash_of(const Batch& batch) {
  Hash hash;
  hash.add(batch.number);
  hash.add(batch.plan);
  hash.add(static_cast<std::uint64_t>(batch.tuning.chunk_bytes));
  hash.add(static_cast<std::uint64_t>(batch.tuning.lanes));
  hash.add(static_cast<std::uint64_t>(batch.tuning.latency_percent));
  for (const OperationPtr& operation : batch.operations) {
    hash.add(operation->identity->digest);
  }
  return hash.value();
}

// A batch without operations marks the end of a plan.
bool is_end_of_plan(const Batch& batch) { return batch.operations.empty(); }

}  // namespace

std::string Batch::describe() const {
  std::string text = operations.front()->describe();
  if (operations.size() > 1) {
    text += " (with " + std::to_string(operations.size() - 1) + " more in its batch)";
  }
  return text;
}

Executor::Executor(std::uint32_t set, std::unique_ptr<Comm> comm, Run run)
    : set_(set), comm_(std::move(comm)), run_(std::move(run)) {}

Executor::~Executor() = default;

Channel Executor::channel_of(std::uint32_t plan, std::uint64_t number) const {
  return {.set = set_, .epoch = plan, .batch = number};
}

std::optional<Batch> Executor::end_plan(std::uint32_t plan, std::uint64_t last) {
  const auto is_withdrawn = [&](const Batch& batch) {
    return batch.plan == plan && batch.number > last;
  };
  std::optional<Batch> withdrawn;
  if (running_ && is_withdrawn(queue_.front())) {
    running_.reset();
    comm_->withdraw();
    withdrawn = std::move(queue_.front());
    queue_.pop_front();
  } else if (!queue_.empty() && is_withdrawn(queue_.back())) {
    withdrawn = std::move(queue_.back());
    queue_.pop_back();
  }
  comm_->drop(channel_of(plan, last + 1));
  // A marker that is handled in its turn: batches that all ranks have joined still have to run.
  queue_.emplace_back();
  return withdrawn;
}

void Executor::start() {
  Batch& batch = queue_.front();
  running_.emplace();
  running_->channel = channel_of(batch.plan, batch.number);
  running_->channel.check = hash_of(batch);
  comm_->begin(running_->channel, batch.trace.get(), batch.tuning);
  if (batch.trace) batch.trace->start();
  running_->fiber.emplace(run_(*comm_, batch));
}

std::optional<Batch> Executor::poll() {
  if (!running_) {
    for (; !queue_.empty() && is_end_of_plan(queue_.front()); queue_.pop_front()) {
      comm_->resume();
      progress_ = true;
    }
    if (queue_.empty()) return std::nullopt;
    start();
    progress_ = true;
  }
  const bool ended = running_->fiber->poll();
  progress_ |= running_->fiber->advanced();
  if (!ended) return std::nullopt;
  running_.reset();
  comm_->end();
  std::optional<Batch> batch(std::move(queue_.front()));
  queue_.pop_front();
  return batch;
}

std::vector<int> Executor::blame() const {
  return running_ ? running_->fiber->blame() : std::vector<int>{};
}

bool Executor::next_is_on_gpu() const {
  // poll() passes the ends of plans and starts the batch behind them.
  const auto next = std::find_if_not(queue_.begin(), queue_.end(), is_end_of_plan);
  return next != queue_.end() && next->on_gpu();
}

bool Executor::has_gpu_batches_without_turns() const {
  const auto has_none = [](const Batch& batch) { return batch.on_gpu() && batch.turns == nullptr; };
  return std::any_of(queue_.begin(), queue_.end(), has_none);
}

bool Executor::gpu_is_busy() const { return gpu() != nullptr && gpu()->busy(); }

std::vector<Batch> Executor::take_all() {
  std::vector<Batch> batches;
  running_.reset();
  for (Batch& batch : queue_) {
    if (!batch.operations.empty()) batches.push_back(std::move(batch));
  }
  queue_.clear();
  return batches;
}

}  // namespace horoplug
