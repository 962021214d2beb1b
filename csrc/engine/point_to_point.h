// send and recv on one rank: matches them with the peers' and moves the tensors.
//
// Data travels over the links that collectives use between two ranks, on channels of its own, in
// windows, so that a large tensor does not keep other frames from a link for long. Tensors on a GPU
// go through the host's memory.
#pragma once

#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "collectives/comm.h"
#include "controller/point_to_point_matcher.h"
#include "device/cuda/runtime/workspace.h"
#include "engine/executor.h"
#include "engine/operation.h"
#include "transport/mesh.h"

namespace horoplug {

// Used by the thread that runs the progress loop.
class PointToPoint {
 public:
  // `on_start` is told of each transfer before it begins.
  PointToPoint(int rank, Mesh& mesh, std::function<void(Batch&)> on_start);
  ~PointToPoint();

  void submit(const OperationPtr& operation);
  // A control message about a send. Throws WireError.
  void receive(int from, const MessageHead& head, Reader& reader);
  // Answers an offer to a process set that does not exist any more.
  void refuse(int from, std::uint32_t set, Reader& reader, const Status& status);

  // Fails the operations of a process set that have no partner yet.
  void fail(std::uint32_t set, const Status& status) { matcher_.fail(set, status); }
  void forget_set(std::uint32_t set) { matcher_.forget_set(set); }

  // Sends messages, starts transfers and gets on with them; those on GPUs only if `gpu_may_run`.
  // True if anything has changed. Throws what a transfer throws; the object is of no use after
  // that.
  bool advance(bool gpu_may_run);
  struct Ended {
    OperationPtr operation;
    Status status;
  };
  std::vector<Ended> take_ended() { return std::exchange(ended_, {}); }

  // Whether no transfer is running. Operations without a partner do not count.
  bool idle() const { return transfers_.empty(); }
  bool has_transfers(std::uint32_t set) const;
  // Whether a transfer waits for something that nobody announces.
  bool polled() const;
  bool on_gpu() const;
  // Operations without a partner, by handle.
  const std::map<std::uint64_t, OperationPtr>& waiting() const { return waiting_; }
  // The transfer that began first: what it is, and the rank at the other end. Not if idle.
  std::string describe_oldest() const;
  std::vector<int> peers() const;

  double last_progress = 0;  // when a transfer has last got on, or there was none

  // All operations that have not ended, for the end of the engine.
  std::vector<OperationPtr> take_all();

 private:
  struct Transfer {
    OperationPtr operation;
    OperationPtr partner;  // the recv of this rank, if it sends to itself
    int peer = 0;
    std::uint64_t number = 0;
    Batch batch{};  // for the timeline
    std::unique_ptr<Comm> comm{};
    std::unique_ptr<Fiber> fiber{};  // nullptr: has not begun
    bool sends() const { return operation->signature.op == OpKind::kSend; }
    bool on_gpu() const {
      return operation->signature.device >= 0 ||
             (partner != nullptr && partner->signature.device >= 0);
    }
  };
  void handle(const PointToPointMatcher::Event& event);
  OperationPtr take_waiting(std::uint64_t ticket);
  bool may_begin(const Transfer& transfer) const;
  void begin(Transfer& transfer);
  Task run(Transfer& transfer);
  void end(Transfer& transfer, const Status& status);
  cuda::Workspace& workspace(const Operation& operation);

  const int rank_;
  Mesh& mesh_;
  const std::function<void(Batch&)> on_start_;
  PointToPointMatcher matcher_;
  std::map<std::uint64_t, OperationPtr> waiting_;
  std::unique_ptr<cuda::Workspace> workspace_;  // if a tensor has been on a GPU
  bool has_host_memory_[2]{};                   // of the workspace, by direction
  std::list<Transfer> transfers_;
  std::vector<Ended> ended_;
};

}  // namespace horoplug
