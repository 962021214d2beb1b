// The GPUs of a process set's ranks: their common capabilities, and the work in progress on this
// rank's GPU.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/running_clock.h"
#include "base/task.h"
#include "collectives/comm.h"
#include "device/cuda/runtime/ipc_peers.h"
#include "device/cuda/runtime/nccl_communicator.h"
#include "device/cuda/runtime/workspace.h"

namespace horoplug {

class GpuGroup {
 public:
  enum class Ranks { kOfSet, kOfHost, kOfHostWithoutNccl };
  // `ranks`: kOfHost for the ranks of one host within a larger set. NCCL is not used there if the
  // whole set uses it.
  explicit GpuGroup(std::shared_ptr<cuda::Device> device, Ranks ranks = Ranks::kOfSet)
      : device_(std::move(device)), ranks_(ranks), workspace_(device_) {}

  // Working memory and streams on this rank's GPU.
  cuda::Workspace& workspace() { return workspace_; }

  // Collective, in the first batch of GPU tensors: ranks exchange their capabilities, so that all
  // of them choose the same algorithms. `wanted`: the algorithm that the user has forced, or
  // nullptr.
  Task agree(Comm& comm, const char* wanted);
  bool agreed() const { return agreed_; }
  // Valid afterwards: the ranks' communicator, or nullptr on all of them.
  cuda::NcclCommunicator* nccl() const { return nccl_.get(); }
  // Whether NCCL can run this reduction on every rank.
  bool nccl_reduces(ReduceOp op, DType dtype) const {
    return cuda::nccl_type(dtype, least_nccl_version_, least_compute_capability_) &&
           cuda::nccl_op(op, dtype);
  }
  // Likewise: the ranks' buffers, if they access each other's GPUs by CUDA IPC.
  cuda::IpcPeers* ipc() const { return ipc_.get(); }
  // Likewise: which collectives of the set's MPI accept GPU memory on all ranks.
  Mpi::OnGpu mpi() const { return mpi_; }

  // Likewise, and only when it may matter, because it takes an exchange: creates a group for the
  // ranks of each host, if all hosts have the same number of ranks, more than one
  // (Comm::local_comm).
  Task agree_in_hosts(Comm& comm);
  bool agreed_in_hosts() const { return agreed_in_hosts_; }
  // Valid afterwards: whether the GPUs of every host can reduce among themselves, without NCCL if
  // NCCL does not support the reduction.
  bool works_in_hosts(bool nccl_reduces) const { return nccl_reduces ? in_hosts_ : ipc_in_hosts_; }
  bool nccl_in_hosts() const { return nccl_in_hosts_; }

  // Whether the set runs this kind of batch for the first time on this rank. It may then need
  // kernels or memory that do not exist yet.
  bool is_first(std::uint64_t kind) { return kinds_.insert(kind).second; }

  // ---- work in progress on the GPU, for the watchdog

  // Throws an error that NCCL has reported.
  void check();

  // Encloses all work of a batch on the GPU. `what`: for messages.
  void track(std::string what, cuda::EventPtr begun, cuda::EventPtr ended);
  // Removes finished work. Returns for how long the oldest unfinished work is known to have been
  // running; 0 if it has not begun, or there is none. Throws the GPU's own failure.
  Seconds standstill(RunningTime now);
  // Describes that work.
  const std::string& next() const { return under_way_.front().what; }
  // Whether there may be unfinished work.
  bool busy() const { return !under_way_.empty(); }
  // Whether the oldest work still waits for work in the framework's streams, which may take any
  // time.
  bool has_not_begun() const { return busy() && !under_way_.front().begun->done(); }
  // "allreduce 'a' and 2 others": operations that may be unfinished; empty if there are none.
  std::string unfinished() const;
  // Pinned working memory may be written again once the GPU has reached this point.
  void keep_pinned_memory(cuda::EventPtr until) { pinned_memory_free_ = std::move(until); }
  Task pinned_memory_free();
  // Whether other ranks no longer use resources of this one. All ranks must poll this after all
  // work has been enqueued.
  bool over();
  // Releases resources shared with other ranks, when no rank has unfinished work.
  void close();
  // Ends the work of all process sets of a rank, because other ranks will not take part in it:
  // results are undefined. Takes a short time, whatever the GPU does (abort.cc).
  static void abort(std::span<GpuGroup* const> groups);

 private:
  struct Work {
    std::string what;
    cuda::EventPtr begun, ended;
    std::optional<RunningTime> seen{};  // when it was first seen running
  };

  // The capabilities that ranks exchange.
  struct Capabilities {
    CUuuid device;
    int compute_capability;    // 90 is 9.0
    int nccl_version;          // 0: none
    int nccl_shares_a_device;  // several ranks may share a GPU
    Mpi::OnGpu mpi;
  };
  Capabilities capabilities(const Comm& comm) const;
  std::string nccl_obstacle(const Comm& comm, const std::vector<Capabilities>& all) const;
  Task connect_nccl(Comm& comm, const std::vector<Capabilities>& all);
  void settle_mpi(Comm& comm, const std::vector<Capabilities>& all, bool wanted);
  // Logs why a method cannot be used, as a warning or as information.
  void explain(bool aloud, const std::string& text) const;
  void forget_ended();
  void add_to(std::vector<GpuGroup*>& all);

  const std::shared_ptr<cuda::Device> device_;
  const Ranks ranks_;
  cuda::Workspace workspace_;
  std::unique_ptr<cuda::NcclCommunicator> nccl_;
  std::unique_ptr<cuda::IpcPeers> ipc_;
  Mpi::OnGpu mpi_ = Mpi::OnGpu::kNothing;
  int least_nccl_version_ = 0, least_compute_capability_ = 0;  // minimum over all ranks
  std::shared_ptr<GpuGroup>
      host_;  // of the ranks of this host, which hold it in Comm::local_comm()
  bool agreed_ = false, agreed_in_hosts_ = false;
  std::string no_hosts_;  // why the GPUs of a host do not work together without other hosts
  bool in_hosts_ = false, nccl_in_hosts_ = false, ipc_in_hosts_ = false;
  std::set<std::uint64_t> kinds_;
  std::deque<Work> under_way_;
  cuda::EventPtr pinned_memory_free_;
};

// Waits until the GPU has reached an event. There is no notification.
class Passed final : public Waitable {
 public:
  explicit Passed(cuda::EventPtr event) : event_(std::move(event)) {}
  bool ready() override { return event_->done(); }
  void blame(std::vector<int>&) const override {}  // this rank's own GPU
  bool polled() const override { return true; }

 private:
  const cuda::EventPtr event_;
};

// The same, if the GPU waits for other ranks' GPUs first.
class PassedByAll final : public Waitable {
 public:
  PassedByAll(const Comm& comm, cuda::EventPtr event) : comm_(comm), event_(std::move(event)) {}
  bool ready() override {
    comm_.gpu()->check();
    return event_->done();
  }
  void blame(std::vector<int>& ranks) const override { comm_.everyone_else(ranks); }
  bool polled() const override { return true; }

 private:
  const Comm& comm_;
  const cuda::EventPtr event_;
};

// Waits until the GPU has finished all work of the process sets. The driver may wait for that as
// well when something is done on a GPU for the first time, but the driver does not notice that a
// rank has died for which the GPU waits.
class Idle final : public Waitable {
 public:
  Idle(const Comm& comm, cuda::Device& device) : comm_(comm), device_(device) {}
  bool ready() override {
    comm_.gpu()->check();
    return device_.idle();
  }
  void blame(std::vector<int>& ranks) const override { comm_.everyone_else(ranks); }
  bool polled() const override { return true; }

 private:
  const Comm& comm_;
  cuda::Device& device_;
};

// Waits until the communicator accepts the next call.
class Settled final : public Waitable {
 public:
  Settled(const Comm& comm, cuda::NcclCommunicator& nccl) : comm_(comm), nccl_(nccl) {}
  bool ready() override { return nccl_.settled(); }
  void blame(std::vector<int>& ranks) const override { comm_.everyone_else(ranks); }
  bool polled() const override { return true; }

 private:
  const Comm& comm_;
  cuda::NcclCommunicator& nccl_;
};

}  // namespace horoplug
