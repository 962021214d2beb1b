#include "tests/simulated/nccl.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace horoplug::testing {
namespace simulated {

using cuda::kNcclInProgress;
using cuda::kNcclSuccess;

namespace {

std::atomic<NcclMachine*> the_nccl_machine{nullptr};
std::atomic<std::unique_ptr<NcclMachine> (*)()> nccl_factory{nullptr};

}  // namespace

NcclMachine::NcclMachine(const GpuInterface& gpu, SimulatedNcclOptions wanted)
    : options(std::move(wanted)),
      shared(std::make_shared<NcclShared>(gpu, options.folder, options.version)),
      random_(options.seed) {
  fill(api);
  shared->multi_rank = options.multi_rank_gpu;
  NcclMachine* none = nullptr;
  if (the_nccl_machine.compare_exchange_strong(none, this)) return;
  std::fputs("simulated NCCL: this process already has one\n", stderr);
  std::abort();
}

NcclMachine::~NcclMachine() {
  for (const auto& [handle, communicator] : communicators_) communicator->abort();
  the_nccl_machine.store(nullptr);
}

NcclMachine& NcclMachine::get() {
  if (NcclMachine* const machine = the_nccl_machine.load()) return *machine;
  if (const auto make = nccl_factory.load(); make != nullptr) {
    static NcclMachine* const made = make().release();  // once
    return *made;
  }
  std::fputs("simulated NCCL: called after its destruction\n", stderr);
  std::abort();
}

void NcclMachine::set_factory(std::unique_ptr<NcclMachine> (*make)()) { nccl_factory.store(make); }

ncclResult_t NcclMachine::check_call(std::string_view function) {
  const std::lock_guard lock(mutex_);
  const auto failure = failures_.find(function);
  return failure == failures_.end() ? kNcclSuccess : failure->second;
}

void NcclMachine::set_failure(const std::string& function, ncclResult_t result) {
  const std::lock_guard lock(mutex_);
  if (result == kNcclSuccess) {
    failures_.erase(function);
  } else {
    failures_[function] = result;
  }
}

void NcclMachine::set_async_error(ncclResult_t error) {
  const std::lock_guard lock(mutex_);
  for (const auto& [handle, communicator] : communicators_) communicator->set_async_error(error);
}

std::size_t NcclMachine::alive() {
  const std::lock_guard lock(mutex_);
  return communicators_.size();
}

std::string NcclMachine::new_name() {
  const std::lock_guard lock(mutex_);
  return "nccl-" + std::to_string(::getpid()) + "-" + std::to_string(names_++);
}

void NcclMachine::set_last_error(std::string error) {
  const std::lock_guard lock(mutex_);
  last_error_ = std::move(error);
}

std::string NcclMachine::last_error() {
  const std::lock_guard lock(mutex_);
  return last_error_;
}

std::shared_ptr<Communicator> NcclMachine::find(ncclComm_t handle) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = communicators_.find(handle);
    if (found != communicators_.end()) return found->second;
  }
  shared->gpu.misuse("a communicator that is not known, or was destroyed or aborted");
  return nullptr;
}

ncclComm_t NcclMachine::add(std::shared_ptr<Communicator> communicator) {
  const auto handle = reinterpret_cast<ncclComm_t>(communicator.get());
  const std::lock_guard lock(mutex_);
  communicators_[handle] = std::move(communicator);
  return handle;
}

std::shared_ptr<Communicator> NcclMachine::remove(ncclComm_t handle) {
  std::shared_ptr<Communicator> found = find(handle);
  const std::lock_guard lock(mutex_);
  communicators_.erase(handle);
  return found;
}

NcclMachine::Group& NcclMachine::group() {
  thread_local Group group;
  return group;
}

ncclResult_t NcclMachine::start_group() {
  ++group().depth;
  return kNcclSuccess;
}

ncclResult_t NcclMachine::enqueue(ncclComm_t handle, const Operation& operation, CUstream stream) {
  start_group();
  const std::shared_ptr<Communicator> communicator = find(handle);
  const ncclResult_t checked =
      communicator != nullptr ? communicator->check(operation, stream) : kInvalidArgument;
  Group& all = group();
  if (checked != kNcclSuccess) {
    if (all.result == kNcclSuccess) all.result = checked;
    const ncclResult_t ended = end_group();
    return ended != kNcclSuccess ? ended : checked;
  }
  const auto known = std::find_if(all.parts.begin(), all.parts.end(), [&](const Part& part) {
    return part.communicator == communicator;
  });
  if (known == all.parts.end()) {
    all.parts.push_back({communicator, stream, {operation}});
  } else {
    if (known->stream != stream) {
      shared->gpu.misuse("an NCCL group uses a communicator in two streams");
    }
    known->operations.push_back(operation);
  }
  return end_group();
}

ncclResult_t NcclMachine::end_group() {
  Group& all = group();
  if (all.depth == 0) return kInvalidUsage;
  if (--all.depth > 0) return kNcclSuccess;
  Group done = std::exchange(all, {});
  if (done.result != kNcclSuccess) return done.result;
  ncclResult_t result = kNcclSuccess;
  for (Part& part : done.parts) {
    const ncclResult_t launched = launch(std::move(part));
    if (launched != kNcclSuccess && result != kNcclSuccess && result != kNcclInProgress) continue;
    if (launched != kNcclSuccess) result = launched;
  }
  return result;
}

ncclResult_t NcclMachine::launch(Part part) {
  bool late = false;
  if (!part.communicator->blocking && options.late > 0) {
    const std::lock_guard lock(mutex_);
    late = random_() % static_cast<unsigned>(options.late) == 0;
  }
  return part.communicator->enqueue(std::move(part.operations), part.stream, late);
}

}  // namespace simulated

SimulatedNccl::SimulatedNccl(SimulatedGpu&, SimulatedNcclOptions options)
    : SimulatedNccl(simulated::gpu_interface(), std::move(options)) {}
SimulatedNccl::SimulatedNccl(const simulated::GpuInterface& gpu, SimulatedNcclOptions options)
    : machine_(std::make_unique<simulated::NcclMachine>(gpu, std::move(options))) {}
SimulatedNccl::~SimulatedNccl() = default;

const cuda::NcclApi& SimulatedNccl::api() const { return machine_->api; }
void SimulatedNccl::fail(const std::string& function, ncclResult_t result) {
  machine_->set_failure(function, result);
}
void SimulatedNccl::set_async_error(ncclResult_t error) { machine_->set_async_error(error); }
std::size_t SimulatedNccl::alive() const { return machine_->alive(); }

}  // namespace horoplug::testing
