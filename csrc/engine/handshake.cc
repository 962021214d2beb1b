#include "engine/handshake.h"

#include <algorithm>
#include <array>
#include <map>

#include "base/time.h"
#include "engine/job_tree.h"
#include "transport/shm/transfer_slots.h"

namespace horoplug {
namespace {

std::string text_of(const std::array<LinkCosts, kOpKindCount>& costs) {
  std::string text;
  for (const auto& [latency, byte] : costs) {
    text += std::to_string(latency) + " + " + std::to_string(byte) + " ";
  }
  return text;
}

// The streams between this rank and any other one.
struct Streams {
  std::size_t connections = 0;
  std::map<std::string, std::size_t> beside;  // those that carry data only, by name

  std::string carrier() const {
    std::string text;
    for (const auto& [name, count] : beside) {
      text += (text.empty() ? "over " : " and ") + name;
      if (count > 1) text += " (" + std::to_string(count) + " streams)";
    }
    return text.empty() ? "over TCP" : text;
  }
};

Streams most_streams(const Mesh& mesh) {
  Streams most;
  for (int rank = 0; rank < mesh.size(); ++rank) {
    Streams streams;
    for (const Link* lane : mesh.lanes(rank)) {
      const bool carries_all = lane->traits().carries == Stream::Carries::kEverything;
      ++(carries_all ? streams.connections : streams.beside[lane->traits().name]);
    }
    most.connections = std::max(most.connections, streams.connections);
    for (const auto& [name, count] : streams.beside) {
      most.beside[name] = std::max(most.beside[name], count);
    }
  }
  return most;
}

std::vector<std::pair<std::string, std::string>> settings_of(const EngineConfig& config,
                                                             const Mesh& mesh) {
  const Streams streams = most_streams(mesh);
  std::vector<std::pair<std::string, std::string>> settings{
      {"horoplug version", HOROPLUG_VERSION},
      {"number of ranks", std::to_string(config.size())},
      {"data between hosts (HOROVOD_CPU_OPERATIONS)", streams.carrier()},
      {"number of connections between hosts (HOROPLUG_NUM_STREAMS)",
       std::to_string(streams.connections)},
      {"latency between hosts", std::to_string(config.options.costs.stream.latency)},
      {"time per byte between hosts", std::to_string(config.options.costs.stream.byte)},
      {"costs of MPI's own collectives", config.mpi ? text_of(config.options.costs.mpi) : "none"},
  };
  const auto compared = compared_settings(config.options);
  settings.insert(settings.begin() + 2, compared.begin(), compared.end());
  return settings;
}

}  // namespace

Handshake::Handshake(EngineConfig& config, Mesh& mesh, Doorbell& doorbell, Done done,
                     RunningTime now)
    : config_(config),
      mesh_(mesh),
      doorbell_(doorbell),
      done_(std::move(done)),
      settings_(settings_of(config, mesh)),
      segment_bytes_(config.members.size()),
      started_at_(now) {
  for (int rank = 0; rank < config.size(); ++rank) missing_ += mesh.connected(rank) ? 1 : 0;
  if (config.connection_requests) tree_ = position_in_job(config);
  children_ = tree_.children;
}

void Handshake::begin() {
  Member& self = config_.self();
  if (!self.segment && self.segment_file) {
    self.segment = Segment::create(self.segment_file, TransferSlots::kEnd);
    doorbell_.share_word(&Arena(*self.segment).header().asleep);
  }
  Hello hello;
  hello.rank = config_.rank;
  hello.size = config_.size();
  hello.segment_bytes = self.segment ? self.segment->size() : 0;
  hello.settings = settings_;
  segment_bytes_[static_cast<std::size_t>(config_.rank)] = hello.segment_bytes;
  --missing_;
  mesh_.send_control_to_connected(encode(hello));
  advance();
}

void Handshake::receive(int from, const Hello& hello) {
  const std::string who = "rank " + std::to_string(from);
  if (hello.protocol != Hello::kProtocol) {
    throw Error(HP_MISMATCH,
                who + " runs another version of horoplug; install the same one everywhere");
  }
  auto& known = segment_bytes_[from];
  if (known) throw WireError("it introduced itself twice");
  if (hello.rank != from) throw WireError("it calls itself rank " + std::to_string(hello.rank));
  for (std::size_t i = 0; i < settings_.size() && i < hello.settings.size(); ++i) {
    if (settings_[i] != hello.settings[i]) {
      throw Error(HP_MISMATCH, "ranks are configured differently: " + settings_[i].first + " is " +
                                   settings_[i].second + " on rank " +
                                   std::to_string(config_.rank) + " but " +
                                   hello.settings[i].second + " on " + who +
                                   "; it must be the same on every rank");
    }
  }
  known = hello.segment_bytes;
  --missing_;
  advance();
}

void Handshake::receive_introduced(int from) {
  if (subtree_introduced_ && from == tree_.parent) return start();
  if (std::erase(children_, from) == 0) throw WireError("it introduced its subtree twice");
  advance();
}

void Handshake::advance() {
  if (missing_ > 0 || !children_.empty() || std::exchange(subtree_introduced_, true)) return;
  if (tree_.is_root()) return start();
  mesh_.send_control(tree_.parent, encode(MessageKind::kIntroduced));
}

void Handshake::start() {
  for (const int child : tree_.children)
    mesh_.send_control(child, encode(MessageKind::kIntroduced));
  finish();
}

void Handshake::finish() {
  const int here = config_.self().host;
  std::vector<Segment> segments;
  for (int rank = 0; rank < config_.size(); ++rank) {
    Member& member = config_.members[rank];
    if (rank != config_.rank && !member.segment && member.segment_file) {
      if (segment_bytes_[rank].value_or(0) < TransferSlots::kEnd) {
        throw WireError("its segment is too small");
      }
      member.segment = Segment::map(member.segment_file, TransferSlots::kEnd);
      member.doorbell->share_word(&Arena(*member.segment).header().asleep);
    }
    if (member.host == here && member.segment) segments.push_back(*member.segment);
  }
  done_(std::move(segments));
}

void Handshake::check_deadline(RunningTime now) const {
  const Seconds limit = config_.options.data_timeout.get();
  if (now - started_at_ < limit) return;
  throw Error(HP_TIMEOUT, "no answer from " + describe_ranks(awaited()) + " within " +
                              describe_seconds(limit) + " of the start");
}

std::vector<int> Handshake::awaited() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < config_.size(); ++rank) {
    const bool introduced = segment_bytes_[rank].has_value();
    if (!introduced && mesh_.connected(rank)) ranks.push_back(rank);
  }
  if (ranks.empty()) ranks = children_;
  if (ranks.empty()) ranks.push_back(tree_.parent);
  return ranks;
}

}  // namespace horoplug
