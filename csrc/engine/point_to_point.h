// send and recv on one rank: matches them with the peers' and moves the tensors.
//
// A tensor takes one of the paths of collectives/point_to_point.h: in the offer, through slots in
// shared memory, or over the links that collectives use between two ranks, on a channel of its own.
// Tensors on a GPU go through the CPU's memory.
#pragma once

#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "base/running_clock.h"
#include "collectives/comm.h"
#include "collectives/point_to_point.h"
#include "controller/point_to_point_matcher.h"
#include "device/cuda/runtime/workspace.h"
#include "engine/execution/executor.h"
#include "engine/operations/operation.h"
#include "engine/options.h"
#include "transport/mesh.h"
#include "transport/shm/transfer_slots.h"

namespace horoplug {

// Used by the thread that runs the progress loop.
class PointToPoint {
 public:
  // `on_start` is told of each transfer before it begins. The handshake, which maps the segments of
  // the members, is over before the first operation.
  PointToPoint(const EngineConfig& config, Mesh& mesh, std::function<void(Batch&)> on_start);
  ~PointToPoint();

  void submit(const OperationPtr& operation);
  // A control message about a send. Throws WireError.
  void receive(int from, const MessageHead& head, Reader& reader);
  // Answers an offer to a process set that does not exist any more.
  void refuse(int from, std::uint32_t set, Reader& reader, const Status& status);

  // Fails the operations of a process set that have no partner yet.
  void fail(std::uint32_t set, const Status& status) { matcher_.fail(set, status); }
  // A peer has left in good order: nothing is sent to it or received from it any more. Its
  // transfers are over, because it has waited for their end.
  void depart(int peer);
  void forget_set(std::uint32_t set) { matcher_.forget_set(set); }

  // Sends messages, starts transfers and advances them; those on GPUs only if `gpu_may_run`.
  // True if anything has changed. Throws what a transfer throws; the object must not be used
  // afterwards.
  bool advance(bool gpu_may_run);
  struct Ended {
    OperationPtr operation;
    Status status;
  };
  std::vector<Ended> take_ended() { return std::exchange(ended_, {}); }

  // Whether no transfer is running. Operations without a partner do not count.
  bool idle() const { return transfers_.empty(); }
  bool has_transfers(std::uint32_t set) const;
  // Whether a transfer waits for something without notification, so that it must be polled.
  bool polled() const;
  bool on_gpu() const;
  // Operations without a partner, by handle.
  const std::map<std::uint64_t, OperationPtr>& waiting() const { return waiting_; }
  // The ranks at the other ends of all transfers.
  std::vector<int> peers() const;

  // Notes which transfers make progress: those that have passed a wait since the last call, and
  // those over whose peer's links data has moved (`moved`, by rank), also data of other
  // transfers, behind which theirs is queued. A transfer that has not begun waits for those that
  // have.
  void note_progress(RunningTime now, const std::vector<bool>& moved);
  struct Standstill {
    const Operation& operation;
    int peer;
    RunningTime last_progress;
  };
  // The transfer that has stood still for longest; nothing if none is under way.
  std::optional<Standstill> longest_standstill() const;

  // All operations that have not ended, for the end of the engine.
  std::vector<OperationPtr> take_all();

 private:
  struct Transfer {
    OperationPtr operation;
    OperationPtr partner;  // the recv of this rank, if it sends to itself
    int peer = 0;
    std::uint64_t number = 0;
    Offer::Source source = Offer::Source::kCpu;  // of a recv: where the sender has the tensor
    Bytes data{};                                // of a recv: the tensor, if the offer had it
    const TransferPath* path = nullptr;          // nullptr: a recv that has not accepted yet
    std::unique_ptr<SlotLoan> loan{};            // of kDirectPath
    Batch batch{};                               // for the timeline
    std::unique_ptr<Comm> comm{};                // of kStreamPath
    std::unique_ptr<Fiber> fiber{};              // nullptr: has not begun
    bool advanced = true;                        // it has passed a wait since the last check
    RunningTime last_progress{};                 // at the last check
    bool sends() const { return operation->signature().op == OpKind::kSend; }
    bool on_gpu() const {
      return operation->signature().device >= 0 ||
             (partner != nullptr && partner->signature().device >= 0);
    }
  };
  void handle(PointToPointMatcher::Event& event);
  void fail_recvs_without_sender();
  OperationPtr take_waiting(std::uint64_t ticket);
  TransferProperties properties_of(const Operation& operation) const;
  TransferProperties properties_of(const Operation& operation, int peer) const;
  bool shares_memory_with(int peer) const;
  std::unique_ptr<SlotLoan> make_loan(int owner, int peer, std::vector<std::uint32_t> slots) const;
  bool accept(Transfer& transfer);
  bool send_messages();
  bool may_begin(const Transfer& transfer) const;
  void begin(Transfer& transfer);
  Task run(Transfer& transfer);
  Task run_on_gpu(Transfer& transfer);
  void end(Transfer& transfer, const Status& status);
  cuda::Workspace& workspace(const Operation& operation);

  const EngineConfig& config_;
  const int rank_;
  Mesh& mesh_;
  const std::function<void(Batch&)> on_start_;
  PointToPointMatcher matcher_;
  SlotPool slots_;
  std::map<std::uint64_t, OperationPtr> waiting_;
  std::unique_ptr<cuda::Workspace> workspace_;  // if a tensor has been on a GPU
  bool has_pinned_memory_[2]{};                 // of the workspace, by direction
  std::list<Transfer> transfers_;
  std::vector<Ended> ended_;
};

}  // namespace horoplug
