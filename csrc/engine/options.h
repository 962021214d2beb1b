// The configuration of an engine.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "base/by_rank.h"
#include "base/log.h"
#include "base/status.h"
#include "collectives/costs.h"
#include "controller/plans/tuner.h"
#include "device/cuda/driver/toolkit.h"
#include "engine/settings.h"
#include "transport/doorbell.h"
#include "transport/fd.h"
#include "transport/mpi/mpi.h"
#include "transport/shm/segment.h"
#include "transport/stream.h"

namespace horoplug {

// The settings, and what the engine is told or derives besides them.
struct EngineOptions : Settings {
  TunerOptions tuner;      // the values to try; the settings `autotune...` replace the rest
  Costs costs;             // from which algorithms are chosen; the same on all ranks
  bool encrypted = false;  // nothing that cannot be encrypted may carry data between hosts
};

// Why nothing can be submitted once this rank has left the job.
inline Status has_shut_down(const EngineOptions& options) {
  return {HP_SHUT_DOWN, "this rank has shut down; " + options.restart};
}

// How one rank is reached. Ranks on the same host share memory: a memfd, or memory of the process
// if they are threads.
struct Member {
  int host = 0;
  // nullptr for the engine's own rank. Without a connection, an AbsentStream, like all lanes.
  std::unique_ptr<Stream> stream;
  // Further streams to share the data. All pairs of ranks on different hosts have the same ones.
  std::vector<std::unique_ptr<Stream>> lanes;
  Fd segment_file;
  std::optional<Segment> segment;
  std::shared_ptr<Doorbell> doorbell;
};

struct EngineConfig {
  int rank = 0;
  ByRank<Member> members;
  // Where to ask for absent connections (see OnDemandConnections); empty: all of them exist. On all
  // ranks or on none.
  Fd connection_requests;
  // If set, its own collectives may run, and streams over it are among the lanes between hosts.
  std::shared_ptr<Mpi> mpi;
  // Opens the CUDA libraries, or throws Error. Called when there is a tensor on a GPU.
  std::function<std::shared_ptr<const cuda::Toolkit>()> toolkit;
  EngineOptions options;
  Log log;

  int size() const { return static_cast<int>(members.size()); }
  const Member& self() const { return members[rank]; }
  Member& self() { return members[rank]; }
};

}  // namespace horoplug
