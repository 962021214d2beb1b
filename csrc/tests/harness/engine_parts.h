// The parts of an engine without the engine, for tests of single parts: the objects that most parts
// need in their constructors. They have no threads; a test calls pump() to move messages.
#pragma once

#include <sys/eventfd.h>

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/running_clock.h"
#include "engine/completion.h"
#include "engine/counters.h"
#include "engine/lifecycle.h"
#include "engine/operations/handle_table.h"
#include "engine/operations/submission_queue.h"
#include "engine/options.h"
#include "engine/peers.h"
#include "engine/process_set_registry.h"
#include "engine/rank_gpu.h"
#include "engine/segment_allocator.h"
#include "engine/tracing.h"
#include "engine/watchdog/suspicion.h"
#include "harness/cluster.h"
#include "transport/absent_stream.h"
#include "transport/mesh.h"

namespace horoplug::testing {

// Points in time, for tests that pass in the time.
constexpr RunningTime at(double seconds) { return RunningTime(Seconds(seconds)); }
constexpr SteadyTime steady_at(double seconds) { return SteadyTime(Seconds(seconds)); }

struct EngineParts {
  explicit EngineParts(EngineConfig given)
      : config(std::move(given)),
        doorbell(config.members[static_cast<std::size_t>(config.rank)].doorbell),
        mesh(take_streams(config), doorbell,
             [this](int from, Bytes message) { received.emplace_back(from, std::move(message)); }) {
    config.log = Log(LogLevel::kTrace,
                     [this](LogLevel, const std::string& text) { logged.push_back(text); });
  }

  static std::vector<std::vector<std::unique_ptr<Stream>>> take_streams(EngineConfig& config) {
    std::vector<std::vector<std::unique_ptr<Stream>>> streams(config.members.size());
    for (std::size_t peer = 0; peer < streams.size(); ++peer) {
      if (config.members[peer].stream) {
        streams[peer].push_back(std::move(config.members[peer].stream));
      }
    }
    return streams;
  }

  EngineConfig config;
  std::vector<std::string> logged;
  std::vector<std::pair<int, Bytes>> received;  // control messages, with their senders
  std::shared_ptr<Doorbell> doorbell;
  Mesh mesh;
  RunningClock clock;
  Activity activity{.last_event = steady_now(), .quiet_since = steady_now()};
  Lifecycle lifecycle;
  HandleTable handles;
  Tracing tracing{config.rank, config.log};
  SubmissionQueue submissions{handles, *doorbell};
  Completion completion{submissions, handles, tracing};
  SegmentAllocator segments{config.members.size()};
  PointToPoint point_to_point{config, mesh, [](Batch&) {}};
  ProcessSetRegistry registry{config, mesh, point_to_point, segments, submissions, completion};
  RankGpu gpu{config, registry, mesh};
  Suspicion suspicion{config.rank, config.size()};
  Peers peers{mesh};
};

// The parts of all ranks of a job without shared memory, connected to each other except for the
// pairs in `absent`.
inline std::vector<std::unique_ptr<EngineParts>> make_parts(
    int ranks, const EngineOptions& options = {},
    const std::vector<std::pair<std::size_t, std::size_t>>& absent = {}) {
  std::vector<EngineConfig> configs = make_configs(Transport::kInproc, ranks, options);
  for (const auto& [a, b] : absent) {
    configs[a].members[b].stream = std::make_unique<AbsentStream>();
    configs[b].members[a].stream = std::make_unique<AbsentStream>();
  }
  std::vector<std::unique_ptr<EngineParts>> parts;
  for (EngineConfig& config : configs) {
    if (!absent.empty()) config.connection_requests = Fd(::eventfd(0, EFD_CLOEXEC));
    parts.push_back(std::make_unique<EngineParts>(std::move(config)));
  }
  return parts;
}

// Moves messages until none is left.
inline void pump(const std::vector<std::unique_ptr<EngineParts>>& ranks) {
  for (bool moved = true; moved;) {
    moved = false;
    for (const auto& rank : ranks) moved |= rank->mesh.pump();
  }
}

// An operation on a set of `ranks` ranks that is not submitted yet.
inline OperationPtr make_test_operation(const std::string& name, int ranks = 2,
                                        OpKind kind = OpKind::kAllreduce, std::uint32_t set = 0) {
  std::vector<int> all;
  for (int rank = 0; rank < ranks; ++rank) all.push_back(rank);
  auto operation = std::make_shared<Operation>();
  operation->members = make_members(set, std::move(all), 0);
  Signature signature;
  signature.op = kind;
  operation->identity = make_identity(name, std::move(signature));
  return operation;
}

// What a set's negotiator has to say.
inline ProcessSet::Negotiated negotiated(ProcessSet& set) {
  ProcessSet::Negotiated answer;
  set.negotiate(answer);
  return answer;
}

// The requests since the last call; nullopt if there are none.
inline std::optional<SubmissionQueue::Requests> take_requests(SubmissionQueue& submissions,
                                                              bool starting = false) {
  SubmissionQueue::Requests requests;
  if (!submissions.take(starting, requests)) return std::nullopt;
  return requests;
}

// Changes the signature of an operation that is not submitted yet.
template <typename Change>
void change_signature(Operation& operation, Change&& change) {
  Signature signature = operation.signature();
  change(signature);
  operation.identity = make_identity(operation.name(), std::move(signature));
}

}  // namespace horoplug::testing
