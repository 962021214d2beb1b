// The configuration of an engine.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/by_rank.h"
#include "base/log.h"
#include "collectives/costs.h"
#include "controller/plans/tuner.h"
#include "device/cuda/driver/toolkit.h"
#include "transport/doorbell.h"
#include "transport/fd.h"
#include "transport/mpi/mpi.h"
#include "transport/shm/segment.h"
#include "transport/stream.h"

namespace horoplug {

// A time limit in seconds, which any thread may change while an engine uses it.
class TimeLimit {
 public:
  TimeLimit(double seconds) : seconds_(seconds) {}  // NOLINT(google-explicit-constructor)
  TimeLimit(const TimeLimit& other) : TimeLimit(static_cast<double>(other)) {}
  TimeLimit& operator=(const TimeLimit& other) {
    seconds_.store(other, std::memory_order_relaxed);
    return *this;
  }
  operator double() const {  // NOLINT(google-explicit-constructor)
    return seconds_.load(std::memory_order_relaxed);
  }

 private:
  std::atomic<double> seconds_;
};

// Times in seconds; negative means never.
struct EngineOptions {
  std::int64_t fusion_threshold = 128 << 20;  // bytes; 0: no fusion
  bool fuse_groups = true;
  std::size_t cache_capacity = 8192;
  int plan_after = 3;  // identical steps; 0: no plans
  Tuning tuning;       // the initial values
  TunerOptions tuner;
  std::string autotune_log;  // a CSV file for the tuner's results; empty: none
  double stall_check_time = 60;
  double stall_shutdown_time = -1;
  TimeLimit data_timeout = 30;
  TimeLimit operation_timeout = 1800;
  double deadlock_time = 5;
  std::string algorithm;       // used wherever it can run; empty: the cheapest
  std::string gpu_algorithm;   // the same for tensors on GPUs; empty: `algorithm`
  std::string process_sets;    // added after the start; the same on all ranks
  Costs costs;                 // from which algorithms are chosen; the same on all ranks
  int progress_cpu = -1;       // the progress thread runs on this CPU only; -1: anywhere
  int local_rank = 0;          // selects the GPU of a rank that joins before it uses one
  double processor_quota = 0;  // processors' worth of time for the ranks of this host; 0: no limit
  bool encrypted = false;      // nothing that cannot be encrypted may carry data between hosts
  // Sends and recvs between the other ranks go on when a rank leaves. Needs operation_timeout:
  // there is no stall inspection without that rank.
  bool transfers_outlive_ranks = false;
};

// How one rank is reached. Ranks on the same host share memory: a memfd, or memory of the process
// if they are threads.
struct Member {
  int host = 0;
  // nullptr for the engine's own rank. Without a connection, an AbsentStream, like all lanes.
  std::unique_ptr<Stream> stream;
  // Further connections, for data only. All pairs of ranks on different hosts have equally many.
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
  // If set, it carries the data between hosts instead of the members' lanes.
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
