// What an engine is made of and how it is tuned.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/log.h"
#include "collectives/costs.h"
#include "controller/tuner.h"
#include "device/cuda/driver/toolkit.h"
#include "transport/doorbell.h"
#include "transport/fd.h"
#include "transport/mpi/mpi.h"
#include "transport/shm/segment.h"
#include "transport/stream.h"

namespace horoplug {

// Times in seconds; negative means never.
struct EngineOptions {
  std::int64_t fusion_threshold = 128 << 20;  // bytes; 0: no fusion
  bool fuse_groups = true;
  std::size_t cache_capacity = 8192;
  int plan_after = 3;  // identical steps; 0: no plans
  Tuning tuning;       // to begin with
  TunerOptions tuner;
  std::string autotune_log;  // a file that gets the tuner's results; empty: none
  double stall_check_time = 60;
  double stall_shutdown_time = -1;
  double data_timeout = 30;
  double operation_timeout = 1800;
  double deadlock_time = 5;
  std::string algorithm;      // forced where it can run; empty: the cheapest
  std::string gpu_algorithm;  // in its place for tensors on GPUs; empty: the same
  std::string process_sets;   // to be added after the start; must be the same on all ranks
  Costs costs;                // from which algorithms are chosen; the same on all ranks
  int progress_cpu = -1;      // the progress thread runs on this CPU only; -1: anywhere
  int local_rank = 0;         // its GPU, if it has joined before it had a tensor on one
};

// How one rank is reached. Ranks of the same host share memory: in a memfd, or plainly if they are
// threads.
struct Member {
  int host = 0;
  std::unique_ptr<Stream> stream;  // nullptr for the engine's own rank
  // Further connections, for data only; their number is the same between all ranks on different
  // hosts.
  std::vector<std::unique_ptr<Stream>> lanes;
  Fd segment_file;
  std::optional<Segment> segment;
  std::shared_ptr<Doorbell> doorbell;
};

struct EngineConfig {
  int rank = 0;
  std::vector<Member> members;  // by rank
  // Carries the data between hosts, if there is one; members' lanes are not used for it then.
  std::shared_ptr<Mpi> mpi;
  // Opens what there is of CUDA, or throws Error; called when there is a tensor on a GPU.
  std::function<std::shared_ptr<const cuda::Toolkit>()> toolkit;
  EngineOptions options;
  Log log;

  int size() const { return static_cast<int>(members.size()); }
};

}  // namespace horoplug
