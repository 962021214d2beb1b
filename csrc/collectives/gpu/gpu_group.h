// The GPUs of a process set's ranks: what they can do together, and what is under way on this one.
#pragma once

#include <deque>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/task.h"
#include "collectives/comm.h"
#include "device/cuda/runtime/ipc_peers.h"
#include "device/cuda/runtime/nccl_communicator.h"
#include "device/cuda/runtime/workspace.h"

namespace horoplug {

class GpuGroup {
 public:
  enum class Ranks { kOfSet, kOfHost, kOfHostWithoutNccl };
  // `ranks`: those of one host, of a set that has more; NCCL is of no use there if all have it.
  explicit GpuGroup(std::shared_ptr<cuda::Device> device, Ranks ranks = Ranks::kOfSet)
      : device_(std::move(device)), ranks_(ranks), workspace_(device_) {}

  // On this rank's GPU.
  cuda::Workspace& workspace() { return workspace_; }

  // Collective, in the first batch of tensors on GPUs: ranks tell each other what they have, so
  // that all of them choose the same algorithms. `wanted`: the one that the user has forced, or
  // nullptr.
  Task agree(Comm& comm, const char* wanted);
  bool agreed() const { return agreed_; }
  // After that: the ranks' communicator, or nullptr on all of them.
  cuda::NcclCommunicator* nccl() const { return nccl_.get(); }
  // Whether NCCL can reduce this on every rank.
  bool nccl_reduces(ReduceOp op, DType dtype) const {
    return cuda::nccl_type(dtype, least_nccl_version_, least_compute_capability_) &&
           cuda::nccl_op(op, dtype);
  }
  // Likewise: the ranks' buffers, if they reach each other's GPUs by CUDA IPC.
  cuda::IpcPeers* ipc() const { return ipc_.get(); }
  // Likewise: what MPI, if the set has one, does with the GPUs' memory on all ranks.
  Mpi::OnGpu mpi() const { return mpi_; }

  // Likewise, when it may matter, as it takes an exchange: makes a group for the ranks of each
  // host, if hosts have several and equally many (Comm::local_comm).
  Task agree_in_hosts(Comm& comm);
  bool agreed_in_hosts() const { return agreed_in_hosts_; }
  // After that: whether GPUs of a host can work together on every host, without NCCL if it does
  // not reduce what there is to reduce.
  bool works_in_hosts(bool nccl_reduces) const { return nccl_reduces ? in_hosts_ : ipc_in_hosts_; }
  bool nccl_in_hosts() const { return nccl_in_hosts_; }

  // Whether it is the first time that the set does this here; then it may take kernels or memory
  // that are not there yet.
  bool is_first(std::uint64_t kind) { return kinds_.insert(kind).second; }

  // ---- what is under way on the GPU, for who watches over it

  // Throws what has gone wrong with NCCL.
  void check();

  // All that a batch does there lies between these two. `what`: for messages.
  void track(std::string what, cuda::EventPtr begun, cuda::EventPtr ended);
  // Forgets what has ended. For how many seconds it has been seen that what comes next has begun,
  // and has not ended; 0: it has not begun, or there is nothing. Throws the GPU's own failure.
  // `now`: seconds.
  double standstill(double now);
  // What that is.
  const std::string& next() const { return under_way_.front().what; }
  // This process has stood still itself.
  void excuse(double seconds);
  // Whether there may be anything.
  bool busy() const { return !under_way_.empty(); }
  // Whether the framework's streams have something to do before it can begin, which may take any
  // time.
  bool has_not_begun() const { return busy() && !under_way_.front().begun->done(); }
  // "allreduce 'a' and 2 others": what may not have ended; empty: nothing.
  std::string unfinished() const;
  // The host's working memory is free to be written again, once the GPU has come to that.
  void keep_host_memory(cuda::EventPtr until) { host_memory_free_ = std::move(until); }
  Task host_memory_free();
  // Whether other ranks do not use anything of this one any more. All of them have to ask, when
  // everything has been put into their streams; again and again.
  bool over();
  // Gives back what concerns other ranks, when nothing is under way on any of them.
  void close();
  // Ends what is under way for all process sets of a rank, as nobody will come to it any more:
  // results are undefined. Does not take long, whatever else the GPU is at (gpu_abort.cc).
  static void abort(std::span<GpuGroup* const> groups);

 private:
  struct Work {
    std::string what;
    cuda::EventPtr begun, ended;
    double seen = -1;  // when it had begun
  };

  // What ranks tell each other.
  struct Capabilities {
    CUuuid device;
    int compute_capability;    // 90 is 9.0
    int nccl_version;          // 0: none
    int nccl_shares_a_device;  // among several ranks
    Mpi::OnGpu mpi;
  };
  Capabilities capabilities(const Comm& comm) const;
  std::string nccl_obstacle(const std::vector<Capabilities>& all) const;
  Task connect_nccl(Comm& comm, const std::vector<Capabilities>& all);
  void settle_mpi(Comm& comm, const std::vector<Capabilities>& all, bool wanted);
  // What a way cannot be used for, aloud or in passing.
  void explain(bool aloud, const std::string& text) const;
  void forget_ended();
  void add_to(std::vector<GpuGroup*>& all);

  const std::shared_ptr<cuda::Device> device_;
  const Ranks ranks_;
  cuda::Workspace workspace_;
  std::unique_ptr<cuda::NcclCommunicator> nccl_;
  std::unique_ptr<cuda::IpcPeers> ipc_;
  Mpi::OnGpu mpi_ = Mpi::OnGpu::kNothing;
  int least_nccl_version_ = 0, least_compute_capability_ = 0;  // of all ranks
  std::shared_ptr<GpuGroup>
      host_;  // of this rank's host's ranks, which have it in Comm::local_comm()
  bool agreed_ = false, agreed_in_hosts_ = false;
  std::string no_hosts_;  // why GPUs of a host do not work together by themselves
  bool in_hosts_ = false, nccl_in_hosts_ = false, ipc_in_hosts_ = false;
  std::set<std::uint64_t> kinds_;
  std::deque<Work> under_way_;
  cuda::EventPtr host_memory_free_;
};

// Waits until the GPU has come to an event. Nobody says when it does.
class Passed final : public Waitable {
 public:
  explicit Passed(cuda::EventPtr event) : event_(std::move(event)) {}
  bool ready() override { return event_->done(); }
  void blame(std::vector<int>&) const override {}  // this rank's own GPU
  bool polled() const override { return true; }

 private:
  const cuda::EventPtr event_;
};

// The same, where the GPU waits for those of other ranks before.
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

// Waits until the GPU has done all that sets have put into their streams. The driver may do so,
// too, where something is done on a GPU for the first time, but it does not see that a rank is
// gone which the GPU waits for.
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

// Waits until a communicator can be called again.
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
