#include "collectives/gpu/gpu_group.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <string_view>
#include <utility>

#include "base/status.h"
#include "collectives/allgather_fixed.h"
#include "collectives/gpu/ipc_connect.h"

namespace horoplug {
namespace {

// From this version on NCCL lets ranks share a GPU, if that is enabled.
constexpr int kNcclSharesDevices = 23000;

// Makes a GPU's context current during every MPI call, because MPI copies from and to the GPU in
// any of them.
class OnDevice final : public Mpi::Setting {
 public:
  explicit OnDevice(std::shared_ptr<cuda::Device> device) : device_(std::move(device)) {}
  bool enter() noexcept override {
    const cuda::Context& context = device_->context();
    return context.api().CtxPushCurrent(context.handle()) == cuda::kSuccess;
  }
  void leave() noexcept override {
    CUcontext popped = nullptr;
    device_->context().api().CtxPopCurrent(&popped);
  }

 private:
  const std::shared_ptr<cuda::Device> device_;
};

// The number of finished operations that are checked at once if there was no poll for long.
constexpr std::size_t kManyUnderWay = 64;

}  // namespace

GpuGroup::Capabilities GpuGroup::capabilities(const Comm& comm) const {
  Capabilities mine{};
  if (comm.mpi() != nullptr) mine.mpi = comm.mpi()->on_gpu();
  const cuda::Context& context = device_->context();
  context.check(context.api().DeviceGetUuid(&mine.device, context.device()), "cuDeviceGetUuid");
  mine.compute_capability = context.capability();
  mine.nccl_version = device_->toolkit().nccl_version;
  const char* const shared = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  mine.nccl_shares_a_device = mine.nccl_version >= kNcclSharesDevices && shared != nullptr &&
                              std::string_view(shared) == "1";
  return mine;
}

Task GpuGroup::agree(Comm& comm, const char* wanted) {
  if (comm.size() > 1) {
    std::vector<Capabilities> all;
    const Capabilities mine = capabilities(comm);
    co_await allgather_fixed(comm, mine, all);
    least_nccl_version_ = mine.nccl_version;
    least_compute_capability_ = mine.compute_capability;
    for (const Capabilities& each : all) {
      least_nccl_version_ = std::min(least_nccl_version_, each.nccl_version);
      least_compute_capability_ = std::min(least_compute_capability_, each.compute_capability);
    }
    const std::string_view wants = wanted != nullptr ? wanted : "";
    const bool hierarchical = wants == "hierarchical";
    if (hierarchical) co_await agree_in_hosts(comm);
    if (hierarchical && !in_hosts_ && comm.host_memory() == nullptr) {
      explain(comm.rank() == 0, "GPU tensors are not reduced in each host first: " + no_hosts_);
    }
    // A forced algorithm other than NCCL does not want NCCL's network.
    if (!in_hosts_ && ranks_ != Ranks::kOfHostWithoutNccl) co_await connect_nccl(comm, all);
    settle_mpi(comm, all, wants == "mpi");
    std::string problem;
    co_await connect_ipc(comm, workspace_, ipc_, problem);
    if (!problem.empty()) {
      explain(wants == "ipc" && comm.rank() == 0,
              "GPU tensors are not moved by CUDA IPC: " + problem);
    }
  }
  agreed_ = true;
}

Task GpuGroup::agree_in_hosts(Comm& comm) {
  agreed_in_hosts_ = true;
  Comm* const host = comm.local_comm();
  if (host == nullptr || !comm.hosts()->even()) {
    no_hosts_ = "each host needs the same number of ranks, at least two";
    co_return;
  }
  host_ = std::make_shared<GpuGroup>(device_, nccl_ ? Ranks::kOfHostWithoutNccl : Ranks::kOfHost);
  host->set_gpu(host_);
  co_await host_->agree(*host, nullptr);
  struct Ways {
    bool nccl, ipc;
  };
  const Ways mine{host_->nccl() != nullptr, host_->ipc() != nullptr};
  std::vector<Ways> all;
  co_await allgather_fixed(comm, mine, all);
  std::vector<int> without;
  nccl_in_hosts_ = ipc_in_hosts_ = true;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    nccl_in_hosts_ &= all[rank].nccl;
    ipc_in_hosts_ &= all[rank].ipc;
    if (!all[rank].nccl && !all[rank].ipc) without.push_back(static_cast<int>(rank));
  }
  in_hosts_ = without.empty();
  if (!in_hosts_) no_hosts_ = describe_ranks(without) + " have neither NCCL nor CUDA IPC there";
}

void GpuGroup::explain(bool aloud, const std::string& text) const {
  const bool of_host = ranks_ != Ranks::kOfSet;
  device_->log()(aloud && !of_host ? LogLevel::kWarning : LogLevel::kInfo,
                 (of_host ? "among the ranks of this host, counted from 0: " : "") + text);
}

// Returns one line that says why the ranks cannot use NCCL together, or an empty string.
std::string GpuGroup::nccl_obstacle(const Comm& comm, const std::vector<Capabilities>& all) const {
  if (comm.nccl_forbidden()) {
    return "it does not encrypt what it sends to other hosts (HOROPLUG_ENCRYPT)";
  }
  std::map<int, std::vector<int>> versions;
  std::map<std::string, std::vector<int>> devices;
  bool shares = true;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const Capabilities& its = all[rank];
    versions[its.nccl_version].push_back(static_cast<int>(rank));
    devices[{its.device.bytes, sizeof its.device.bytes}].push_back(static_cast<int>(rank));
    shares &= its.nccl_shares_a_device != 0;
  }
  if (versions.size() > 1) {
    std::string text = "ranks have different versions of NCCL:";
    for (const auto& [version, ranks] : versions) {
      text += (text.back() == ':' ? " " : ", ") +
              (version == 0 ? std::string("none") : cuda::nccl_version(version)) + " on " +
              describe_ranks(ranks);
    }
    return text;
  }
  if (all.front().nccl_version == 0) return device_->toolkit().nccl_problem;
  for (const auto& [device, ranks] : devices) {
    if (ranks.size() == 1 || shares) continue;
    return describe_ranks(ranks) +
           " share a GPU, which NCCL refuses (from 2.30 on, NCCL_MULTI_RANK_GPU_ENABLE=1 lets it)";
  }
  return {};
}

Task GpuGroup::connect_nccl(Comm& comm, const std::vector<Capabilities>& all) {
  std::string problem = nccl_obstacle(comm, all);
  if (problem.empty()) {
    std::vector<ncclUniqueId> ids;
    ncclUniqueId id{};
    if (comm.rank() == 0) id = cuda::NcclCommunicator::make_id(*device_);
    co_await allgather_fixed(comm, id, ids);
    try {
      nccl_ =
          std::make_unique<cuda::NcclCommunicator>(device_, ids.front(), comm.size(), comm.rank());
      co_await Settled(comm, *nccl_);
    } catch (const Error& error) {
      problem = error.what();
    }
    std::vector<char> connected;
    const char mine = problem.empty() ? 1 : 0;
    co_await allgather_fixed(comm, mine, connected);
    for (std::size_t rank = 0; rank < connected.size(); ++rank) {
      if (connected[rank] != 0) continue;
      if (problem.empty())
        problem = "it cannot be used by " + describe_ranks({static_cast<int>(rank)});
    }
  }
  if (problem.empty()) co_return;
  nccl_.reset();
  explain(comm.rank() == 0, "GPU tensors are not moved by NCCL: " + problem);
}

// The minimum of what all ranks' MPI supports.
void GpuGroup::settle_mpi(Comm& comm, const std::vector<Capabilities>& all, bool wanted) {
  if (comm.mpi() == nullptr) return;
  mpi_ = Mpi::OnGpu::kAll;
  for (const Capabilities& each : all) mpi_ = std::min(mpi_, each.mpi);
  if (mpi_ != Mpi::OnGpu::kNothing) comm.mpi()->set(std::make_shared<OnDevice>(device_));
  if (mpi_ == Mpi::OnGpu::kAll) return;
  std::vector<int> ranks;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].mpi == mpi_) ranks.push_back(static_cast<int>(rank));
  }
  const std::string where = ranks.size() < all.size() ? "on " + describe_ranks(ranks) + ", " : "";
  explain(wanted && comm.rank() == 0,
          mpi_ == Mpi::OnGpu::kNothing
              ? "GPU tensors are not moved by MPI: " + where +
                    "it does not say that it takes GPUs' memory (HOROPLUG_MPI_CUDA=1, if it does)"
              : "GPU tensors are moved by MPI, but not reduced by it: " + where +
                    "its nonblocking reductions are not known to take GPUs' memory "
                    "(HOROPLUG_MPI_CUDA=1, if they do)");
}

void GpuGroup::track(std::string what, cuda::EventPtr begun, cuda::EventPtr ended) {
  if (under_way_.size() >= kManyUnderWay) forget_ended();
  device_->track(workspace_.stream().handle());
  under_way_.push_back({std::move(what), std::move(begun), std::move(ended)});
}

void GpuGroup::forget_ended() {
  while (!under_way_.empty() && under_way_.front().ended->done()) under_way_.pop_front();
}

Seconds GpuGroup::standstill(RunningTime now) {
  forget_ended();
  if (under_way_.empty()) return Seconds::zero();
  check();
  Work& first = under_way_.front();
  // Work that the framework's streams do first may take any time.
  if (!first.seen && first.begun->done()) first.seen = now;
  return first.seen ? now - *first.seen : Seconds::zero();
}

void GpuGroup::check() {
  if (nccl_) nccl_->settled();
  if (host_) host_->check();
}

std::string GpuGroup::unfinished() const {
  if (under_way_.empty()) return {};
  std::string text = under_way_.front().what;
  if (under_way_.size() > 1) {
    text += " and " + std::to_string(under_way_.size() - 1) + " more after it";
  }
  return text;
}

Task GpuGroup::pinned_memory_free() {
  if (pinned_memory_free_) co_await Passed(std::exchange(pinned_memory_free_, nullptr));
}

bool GpuGroup::over() {
  const bool over_in_host = !host_ || host_->over();
  return (!ipc_ || ipc_->closed_by_all(workspace_.stream().handle())) && over_in_host;
}

void GpuGroup::close() {
  if (ipc_) ipc_->close();
  if (nccl_) nccl_->close();
  if (host_) host_->close();
}

}  // namespace horoplug
