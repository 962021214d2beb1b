// Turns hp_config and hp_settings into an EngineConfig.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <span>
#include <vector>

#include "collectives/collective.h"
#include "collectives/point_to_point.h"
#include "engine/abi/abi.h"
#include "transport/mpi/mpi_stream.h"

namespace horoplug::abi {
namespace {

hp_settings default_settings() {
  hp_settings settings{};
  settings.struct_size = sizeof settings;
#define HP_SETTING(kind, name, variable, initial, ...) settings.name = initial;
#include "horoplug/settings.def"
  return settings;
}

void log_to_stderr(LogLevel, const std::string& text) {
  std::fprintf(stderr, "horoplug: %s\n", text.c_str());
}

Log make_log(const hp_config& config, LogLevel level) {
  if (config.log == nullptr) return {level, log_to_stderr};
  return {level, [log = config.log, user = config.log_user](LogLevel at, const std::string& text) {
            log(user, static_cast<int32_t>(at), text.c_str());
          }};
}

// nullptr without a descriptor: a rank on another host has no doorbell, since data wakes it.
std::shared_ptr<Doorbell> make_doorbell(int fd) {
  return fd >= 0 ? std::make_shared<Doorbell>(Fd(fd)) : nullptr;
}

// nullptr if the job does not use it.
std::shared_ptr<Mpi> open_mpi(const hp_config& given) {
  if (given.mpi == nullptr) return nullptr;
  if (given.libcrypto != nullptr) {
    throw Error(HP_INVALID_ARGUMENT, "MPI does not encrypt what it carries between hosts");
  }
  const hp_mpi full = complete(given.mpi);
  auto mpi = make_mpi(full);
  return full.worker == nullptr ? mpi : make_funnel(mpi, full.worker->thread);
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

// Opens what carries the data, and adds all ranks.
void add_members(EngineConfig& config, const hp_config& given, const std::vector<hp_peer>& peers,
                 StreamFactory& factory) {
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
  if (given.libcrypto != nullptr) factory.encrypt_with(make_libcrypto(complete(given.libcrypto)));
  config.mpi = open_mpi(given);
  std::vector<StreamFactory::DataStream> beside;
  if (config.mpi) {
    beside.emplace_back([&](int rank) { return std::make_unique<MpiStream>(config.mpi, rank); });
  }
  std::vector<Member>& members = config.members;
  members.resize(static_cast<std::size_t>(given.size));
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
    const bool remote = member.host != given.host;
    const int absent = remote && given.connects_on_demand != 0 ? peers[i].lane_count + 1 : 0;
    for (auto& stream : factory.make_all({rank, remote, peers[i].keys},
                                         std::move(taken[i].connections), absent, beside)) {
      (member.stream ? member.lanes.emplace_back() : member.stream) = std::move(stream);
    }
  }
  members[static_cast<std::size_t>(given.rank)] = std::move(self);
}

EngineOptions make_options(const hp_config& given) {
  EngineOptions options;
  if (given.settings != nullptr) {
    static_cast<Settings&>(options) = read_settings(complete(given.settings, default_settings()));
  }
  if (given.link_latency > 0 && given.link_bandwidth > 0) {
    options.costs.stream = {given.link_latency * 1e6, 1e6 / given.link_bandwidth};
  }
  options.encrypted = given.libcrypto != nullptr;
  options.transfers_outlive_ranks &= given.connects_on_demand == 0;
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

EngineConfig make_config(const hp_config& given, StreamFactory& factory) {
  std::vector<hp_peer> peers;
  const auto* at = reinterpret_cast<const char*>(given.peers);
  for (int32_t i = 0; i < given.peer_count; ++i) {
    peers.push_back(complete(reinterpret_cast<const hp_peer*>(at)));
    at += reinterpret_cast<const hp_peer*>(at)->struct_size;
  }
  EngineConfig config;
  if (given.connects_on_demand != 0) config.connection_requests = Fd(given.connection_requests_fd);
  add_members(config, given, peers, factory);
  config.rank = given.rank;
  config.options = make_options(given);
  if (given.mpi != nullptr) {
    const hp_mpi mpi = complete(given.mpi);
    const std::span<const hp_mpi_cost> costs(mpi.costs, static_cast<std::size_t>(mpi.cost_count));
    for (std::size_t i = 0; i < std::min(costs.size(), config.options.costs.mpi.size()); ++i) {
      if (costs[i].latency <= 0) continue;
      config.options.costs.mpi[i] = {costs[i].latency * 1e6, costs[i].byte_time * 1e6};
    }
  }
  std::vector<std::string> files(given.gpu_files, given.gpu_files + given.gpu_file_count);
  config.toolkit = [files = std::move(files)] { return cuda::open_toolkit({files, true}); };
  config.log = make_log(given, static_cast<LogLevel>(config.options.log_level));
  check_algorithm(config.options.algorithm);
  check_algorithm(config.options.gpu_algorithm);
  return config;
}

}  // namespace horoplug::abi

extern "C" void hp_settings_init(hp_settings* settings) {
  horoplug::abi::hand_over(horoplug::abi::default_settings(), settings);
}
