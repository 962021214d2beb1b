// Takes operations through the process sets: from their submission over the negotiation and the
// execution of their batch to their end. Used by the thread that runs the loop.
#pragma once

#include <cstdint>
#include <functional>

#include "engine/completion.h"
#include "engine/counters.h"
#include "engine/operations/submission_queue.h"
#include "engine/peers.h"
#include "engine/point_to_point.h"
#include "engine/process_set_registry.h"
#include "engine/rank_gpu.h"
#include "engine/shared_buffers.h"
#include "engine/tracing.h"
#include "engine/tuning_log.h"
#include "transport/mesh.h"

namespace horoplug {

class Scheduler {
 public:
  // What it works on.
  struct Parts {
    Mesh& mesh;
    ProcessSetRegistry& registry;
    PointToPoint& point_to_point;
    SubmissionQueue& submissions;
    Completion& completion;
    SharedBuffers& buffers;
    RankGpu& gpu;
    Peers& peers;
    Tracing& tracing;
    TuningLog& tuning_log;
    Counters& counters;
    Activity& activity;
    RunningClock& clock;
    bool transfers_outlive_ranks;  // see EngineOptions
  };
  // `on_new_set` is called when a process set has been created.
  Scheduler(Parts parts, std::function<void(std::uint32_t set)> on_new_set)
      : parts_(parts), on_new_set_(std::move(on_new_set)) {}

  // Before operations are taken from the submission queue: what has failed with everything that
  // was submitted before them fails without them, and their numbers follow from that.
  void apply_failures();
  // An operation has come from the submission queue.
  void accept(const OperationPtr& operation);
  // These return whether they have done anything.
  //
  // Sends the messages of the sets' negotiators and applies their decisions.
  bool negotiate();
  // Tells the submission queue how many submissions can change anything.
  bool update_submissions_wanted();
  // Runs the sets' batches as far as possible without waiting. Throws Error if a peer has failed.
  bool execute();
  // Advances sends and recvs, likewise.
  bool transfer();
  // A send or recv begins: `batch` is what the timeline calls it.
  void trace_transfer(Batch& batch);

 private:
  RunningTime note_event();
  void apply(ProcessSet& set, Negotiator::Decision& decision);
  void prepare(const ProcessSet& set, Batch& batch);
  void close(ProcessSet& set, const Negotiator::Decision& decision);
  void close_other_sets(int leaver);
  void administer(const OperationPtr& operation, RunningTime now);
  bool execute(ProcessSet& set);
  std::optional<Batch> poll(ProcessSet& set);
  void finish(ProcessSet& set, const Batch& batch);
  [[noreturn]] void fail(const PeerError& error) const;

  const Parts parts_;
  ProcessSet::Negotiated negotiated_;  // by negotiate(): its memory is used again
  const std::function<void(std::uint32_t)> on_new_set_;
};

}  // namespace horoplug
