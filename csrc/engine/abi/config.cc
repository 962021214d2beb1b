// Turns hp_config into an EngineConfig.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "collectives/collective.h"
#include "collectives/point_to_point.h"
#include "engine/abi/abi.h"
#include "transport/absent_stream.h"

namespace horoplug::abi {
namespace {

// Zero stands for the default.
template <typename Option, typename Value>
void set_unless_zero(Option& option, Value value) {
  if (value != 0) option = value;
}

void set_limit_unless_zero(auto& option, double seconds) {
  if (seconds != 0) option = limit_of(seconds);
}

void log_to_stderr(LogLevel, const std::string& text) {
  std::fprintf(stderr, "horoplug: %s\n", text.c_str());
}

Log make_log(const hp_config& config) {
  const auto level =
      config.log_level == 0 ? LogLevel::kWarning : static_cast<LogLevel>(config.log_level);
  if (config.log == nullptr) return {level, log_to_stderr};
  return {level, [log = config.log, user = config.log_user](LogLevel at, const std::string& text) {
            log(user, static_cast<int32_t>(at), text.c_str());
          }};
}

// nullptr without a descriptor: a rank on another host has no doorbell, since data wakes it.
std::shared_ptr<Doorbell> make_doorbell(int fd) {
  return fd >= 0 ? std::make_shared<Doorbell>(Fd(fd)) : nullptr;
}

std::shared_ptr<Mpi> open_mpi(const hp_mpi& given) {
  auto mpi = make_mpi(given);
  return given.worker == nullptr ? mpi : make_funnel(mpi, given.worker->thread);
}

// A peer, and its connections by lane, of which a peer that is not connected has none.
struct Taken {
  Member member;
  std::vector<Fd> connections;
};

// Takes ownership of all descriptors of a peer.
Taken take(const hp_peer& peer) {
  Taken taken;
  taken.member.host = peer.host;
  taken.member.segment_file = Fd(peer.segment_fd);
  taken.member.doorbell = make_doorbell(peer.doorbell_fd);
  if (peer.stream_fd < 0) return taken;
  taken.connections.emplace_back(peer.stream_fd);
  for (int32_t i = 0; i < peer.lane_count; ++i) taken.connections.emplace_back(peer.lane_fds[i]);
  return taken;
}

// The connections to a peer, which are absent if they are to be made on demand.
StreamMaker::Streams streams_of(const hp_config& given, const hp_peer& peer,
                                std::vector<Fd> connections, const StreamMaker& maker) {
  const bool remote = peer.host != given.host;
  if (connections.empty()) {
    StreamMaker::Streams absent;
    for (int32_t i = 0; remote && given.connects_on_demand != 0 && i <= peer.lane_count; ++i) {
      absent.push_back(std::make_unique<AbsentStream>());
    }
    return absent;
  }
  return maker.make(peer.rank, remote, std::move(connections), peer.keys);
}

// By rank.
std::vector<Member> make_members(const hp_config& given, const std::vector<hp_peer>& peers,
                                 StreamMaker& maker) {
  // Own every descriptor before anything can fail.
  std::vector<Taken> taken;
  for (const hp_peer& peer : peers) taken.push_back(take(peer));
  Member self;
  self.host = given.host;
  self.segment_file = Fd(given.segment_fd);
  self.doorbell = make_doorbell(given.doorbell_fd);

  if (given.size < 1 || given.rank < 0 || given.rank >= given.size ||
      given.peer_count != given.size - 1) {
    throw Error(HP_INVALID_ARGUMENT, "rank, size and peers do not fit together");
  }
  maker.open(given.libcrypto);
  std::vector<Member> members(static_cast<std::size_t>(given.size));
  std::vector<bool> seen(members.size(), false);
  seen[static_cast<std::size_t>(given.rank)] = true;
  for (std::size_t i = 0; i < peers.size(); ++i) {
    const std::int32_t rank = peers[i].rank;
    if (rank < 0 || rank >= given.size || seen[static_cast<std::size_t>(rank)]) {
      throw Error(HP_INVALID_ARGUMENT, "rank " + std::to_string(rank) + " is no peer of rank " +
                                           std::to_string(given.rank) + " or is given twice");
    }
    seen[static_cast<std::size_t>(rank)] = true;
    Member& member = members[static_cast<std::size_t>(rank)] = std::move(taken[i].member);
    for (auto& stream : streams_of(given, peers[i], std::move(taken[i].connections), maker)) {
      (member.stream ? member.lanes.emplace_back() : member.stream) = std::move(stream);
    }
  }
  members[static_cast<std::size_t>(given.rank)] = std::move(self);
  return members;
}

EngineOptions make_options(const hp_config& given) {
  EngineOptions options;
  set_unless_zero(options.fusion_threshold, given.fusion_threshold);
  if (options.fusion_threshold < 0) options.fusion_threshold = 0;
  options.fuse_groups = given.separate_groups == 0;
  if (given.process_sets != nullptr) options.process_sets = given.process_sets;
  if (given.cache_capacity != 0) {
    options.cache_capacity =
        given.cache_capacity < 0 ? 0 : static_cast<std::size_t>(given.cache_capacity);
  }
  if (given.plan_after != 0) options.plan_after = std::max(given.plan_after, 0);
  set_unless_zero(options.tuning.bucket_bytes, given.bucket_bytes);
  if (given.autotune != 0) {
    options.tuner.mode = given.autotune < 0 ? Autotune::kOff : Autotune::kAll;
  }
  options.tuner.fixed = given.autotune_fixed;
  set_unless_zero(options.tuner.warmup, given.autotune_warmup);
  set_unless_zero(options.tuner.turns, given.autotune_steps);
  set_unless_zero(options.tuner.choices, given.autotune_samples);
  if (given.autotune_log != nullptr) options.autotune_log = given.autotune_log;
  set_limit_unless_zero(options.stall_check_time, given.stall_check_time);
  set_limit_unless_zero(options.stall_shutdown_time, given.stall_shutdown_time);
  set_limit_unless_zero(options.data_timeout, given.data_timeout);
  set_limit_unless_zero(options.operation_timeout, given.operation_timeout);
  set_limit_unless_zero(options.deadlock_time, given.deadlock_time);
  options.progress_cpu = given.progress_cpu - 1;
  if (given.link_latency > 0 && given.link_bandwidth > 0) {
    options.costs.stream = {given.link_latency * 1e6, 1e6 / given.link_bandwidth};
  }
  options.local_rank = given.local_rank;
  options.processor_quota = given.processor_quota;
  options.encrypted = given.libcrypto != nullptr;
  options.transfers_outlive_ranks =
      given.transfers_outlive_ranks != 0 && given.connects_on_demand == 0;
  if (given.algorithm != nullptr) options.algorithm = given.algorithm;
  if (given.gpu_algorithm != nullptr) options.gpu_algorithm = given.gpu_algorithm;
  return options;
}

void check_algorithm(const std::string& name) {
  if (name.empty()) return;
  std::string known;
  bool found = false;
  const auto compare = [&](const char* other) {
    found |= name == other;
    if (known.find(other) == std::string::npos) {
      known += (known.empty() ? "" : ", ") + std::string(other);
    }
  };
  for (const auto& algorithm : algorithms()) compare(algorithm.name);
  for (const auto& path : transfer_paths()) compare(path.name);
  if (found) return;
  throw Error(HP_INVALID_ARGUMENT, "unknown algorithm '" + name + "'; there are " + known);
}

}  // namespace

EngineConfig make_config(const hp_config& given, StreamMaker& maker) {
  std::vector<hp_peer> peers;
  const auto* at = reinterpret_cast<const char*>(given.peers);
  for (int32_t i = 0; i < given.peer_count; ++i) {
    peers.push_back(complete(reinterpret_cast<const hp_peer*>(at)));
    at += reinterpret_cast<const hp_peer*>(at)->struct_size;
  }
  EngineConfig config;
  if (given.connects_on_demand != 0) config.connection_requests = Fd(given.connection_requests_fd);
  config.members = make_members(given, peers, maker);
  config.rank = given.rank;
  config.options = make_options(given);
  if (given.mpi != nullptr && given.libcrypto != nullptr) {
    throw Error(HP_INVALID_ARGUMENT, "MPI does not encrypt what it carries between hosts");
  }
  if (given.mpi != nullptr) {
    const hp_mpi mpi = complete(given.mpi);
    config.mpi = open_mpi(mpi);
    const std::span<const hp_mpi_cost> costs(mpi.costs, static_cast<std::size_t>(mpi.cost_count));
    for (std::size_t i = 0; i < std::min(costs.size(), config.options.costs.mpi.size()); ++i) {
      if (costs[i].latency <= 0) continue;
      config.options.costs.mpi[i] = {costs[i].latency * 1e6, costs[i].byte_time * 1e6};
    }
  }
  std::vector<std::string> files(given.gpu_files, given.gpu_files + given.gpu_file_count);
  config.toolkit = [files = std::move(files)] { return cuda::open_toolkit({files, true}); };
  config.log = make_log(given);
  check_algorithm(config.options.algorithm);
  check_algorithm(config.options.gpu_algorithm);
  return config;
}

}  // namespace horoplug::abi
