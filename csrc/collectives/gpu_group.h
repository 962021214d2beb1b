// The GPUs of a process set's ranks: what they can do together, and what is under way on this one.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "base/task.h"
#include "collectives/comm.h"
#include "device/cuda/ipc_peers.h"
#include "device/cuda/nccl_communicator.h"
#include "device/cuda/workspace.h"

namespace horoplug {

class GpuGroup {
 public:
  explicit GpuGroup(std::shared_ptr<cuda::Card> card) : card_(std::move(card)), workspace_(card_) {}

  // On this rank's card.
  cuda::Workspace& workspace() { return workspace_; }

  // Collective, in the first batch of tensors on GPUs: ranks tell each other what they have, so
  // that all of them choose the same algorithms. `wanted`: the one that the user has forced, or
  // nullptr.
  Task agree(Comm& comm, const char* wanted);
  bool agreed() const { return agreed_; }
  // After that: the ranks' communicator, or nullptr on all of them.
  cuda::NcclCommunicator* nccl() const { return nccl_.get(); }
  // Likewise: the ranks' buffers, if they reach each other's cards by CUDA IPC.
  cuda::IpcPeers* ipc() const { return ipc_.get(); }

  // ---- what is under way on the card, for who watches over it

  // All that a batch does there lies between these two. `what`: for messages.
  void track(std::string what, cuda::EventPtr begun, cuda::EventPtr ended);
  // Forgets what has ended. Throws Error (HP_TIMEOUT) if something has begun, and not ended
  // `limit` seconds after it was seen to have, and the card's own failure. `now`: seconds.
  void watch(double now, double limit);
  // Whether there may be anything.
  bool busy() const { return !under_way_.empty(); }
  // "allreduce 'a' and 2 others": what may not have ended; empty: nothing.
  std::string unfinished() const;
  // The host's working memory is free to be written again, once the card has come to that.
  void keep_host_memory(cuda::EventPtr until) { host_memory_free_ = std::move(until); }
  Task host_memory_free();
  // Whether other ranks do not use anything of this one any more. All of them have to ask, when
  // everything has been put into their streams; again and again.
  bool over();
  // Gives back what concerns other ranks, when nothing is under way on any of them.
  void close();
  // Ends what is under way, as nobody will come to it any more: results are undefined.
  void abort();

 private:
  struct Work {
    std::string what;
    cuda::EventPtr begun, ended;
    double seen = -1;  // when it had begun
  };

  // What ranks tell each other.
  struct Facts {
    CUuuid card;
    int ordinal;
    int nccl_version;        // 0: none
    int nccl_shares_a_card;  // among several ranks
  };
  Facts facts() const;
  std::string nccl_obstacle(const std::vector<Facts>& all) const;
  Task connect_nccl(Comm& comm, const std::vector<Facts>& facts);
  void forget_ended();
  void release_ipc();

  const std::shared_ptr<cuda::Card> card_;
  cuda::Workspace workspace_;
  std::unique_ptr<cuda::NcclCommunicator> nccl_;
  std::unique_ptr<cuda::IpcPeers> ipc_;
  bool agreed_ = false;
  std::deque<Work> under_way_;
  cuda::EventPtr host_memory_free_;
};

// Waits until the card has come to an event. Nobody says when it does.
class Passed final : public Waitable {
 public:
  explicit Passed(cuda::EventPtr event) : event_(std::move(event)) {}
  bool ready() override { return event_->done(); }
  void blame(std::vector<int>&) const override {}  // this rank's own card
  bool polled() const override { return true; }

 private:
  const cuda::EventPtr event_;
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
