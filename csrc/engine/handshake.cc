// The start of an engine: every rank introduces itself to every other one, compares settings, and
// maps the memory of those on its host. Also the way of control messages, before and after.
#include <algorithm>

#include "engine/engine.h"

namespace horoplug {
namespace {

std::string text_of(const std::array<LinkCosts, kOpKindCount>& costs) {
  std::string text;
  for (const auto& [latency, byte] : costs) {
    text += std::to_string(latency) + " + " + std::to_string(byte) + " ";
  }
  return text;
}

std::vector<std::pair<std::string, std::string>> settings_of(const EngineConfig& config) {
  std::size_t lanes = 0;
  for (const Member& member : config.members) lanes = std::max(lanes, member.lanes.size());
  return {
      {"horoplug version", HOROPLUG_VERSION},
      {"number of ranks", std::to_string(config.size())},
      {"fusion threshold", std::to_string(config.options.fusion_threshold)},
      {"cache capacity", std::to_string(config.options.cache_capacity)},
      {"process sets", config.options.process_sets.empty() ? "none" : config.options.process_sets},
      {"algorithm", config.options.algorithm.empty() ? "automatic" : config.options.algorithm},
      {"algorithm on GPUs",
       config.options.gpu_algorithm.empty() ? "the same" : config.options.gpu_algorithm},
      {"steps before a plan", std::to_string(config.options.plan_after)},
      {"bucket bytes", std::to_string(config.options.tuning.bucket_bytes)},
      {"autotune", std::to_string(static_cast<int>(config.options.tuner.mode))},
      {"data between hosts", config.mpi ? "over MPI" : "over TCP"},
      {"number of connections between hosts", std::to_string(lanes + 1)},
      {"latency between hosts", std::to_string(config.options.costs.stream.latency)},
      {"time per byte between hosts", std::to_string(config.options.costs.stream.byte)},
      {"costs of MPI's own collectives", config.mpi ? text_of(config.options.costs.mpi) : "none"},
  };
}

}  // namespace

void Engine::begin_handshake() {
  Member& self = config_.members[static_cast<std::size_t>(config_.rank)];
  if (!self.segment && self.segment_file) {
    self.segment = Segment::create(self.segment_file, Arena::kSegmentBytes);
    doorbell_->share_word(&Arena(*self.segment).header().asleep);
  }
  Hello hello;
  hello.rank = config_.rank;
  hello.size = config_.size();
  hello.segment_bytes = self.segment ? self.segment->size() : 0;
  hello.settings = settings_of(config_);
  hellos_[static_cast<std::size_t>(config_.rank)] = hello;
  mesh_->send_control_to_all(encode(hello));
  if (config_.size() == 1) finish_handshake();
}

void Engine::receive(int from, Bytes message) {
  if (state_ != State::kStarting) {
    dispatch(from, message);
    return;
  }
  Reader reader(message);
  const MessageHead head = read_head(reader);
  if (head.kind == MessageKind::kHello) {
    receive_hello(from, decode_hello(reader));
  } else if (head.kind == MessageKind::kAbort || head.kind == MessageKind::kBye) {
    // A peer may be ready, done and gone before this rank has heard from everybody.
    dispatch(from, message);
  } else {
    // Peers that are ready go ahead; their messages keep.
    early_messages_.emplace_back(from, std::move(message));
  }
}

void Engine::receive_hello(int from, const Hello& hello) {
  const std::string who = "rank " + std::to_string(from);
  if (hello.protocol != Hello::kProtocol) {
    throw Error(HP_MISMATCH,
                who + " runs another version of horoplug; install the same one everywhere");
  }
  auto& known = hellos_[static_cast<std::size_t>(from)];
  if (known) throw WireError("it introduced itself twice");
  if (hello.rank != from) throw WireError("it calls itself rank " + std::to_string(hello.rank));
  const auto mine = settings_of(config_);
  for (std::size_t i = 0; i < mine.size() && i < hello.settings.size(); ++i) {
    if (mine[i] != hello.settings[i]) {
      throw Error(HP_MISMATCH, "ranks are configured differently: " + mine[i].first + " is " +
                                   mine[i].second + " on rank " + std::to_string(config_.rank) +
                                   " but " + hello.settings[i].second + " on " + who +
                                   " (set it alike on every rank)");
    }
  }
  known = hello;
  for (const auto& other : hellos_) {
    if (!other) return;
  }
  finish_handshake();
}

void Engine::finish_handshake() {
  std::vector<int> hosts;
  std::vector<int> ranks;
  const int here = config_.members[static_cast<std::size_t>(config_.rank)].host;
  for (int rank = 0; rank < config_.size(); ++rank) {
    Member& member = config_.members[static_cast<std::size_t>(rank)];
    hosts.push_back(member.host);
    ranks.push_back(rank);
    if (rank != config_.rank && !member.segment && member.segment_file) {
      const auto& hello = hellos_[static_cast<std::size_t>(rank)];
      if (hello->segment_bytes < Arena::kSegmentBytes) throw WireError("its segment is too small");
      member.segment = Segment::map(member.segment_file, Arena::kSegmentBytes);
      member.doorbell->share_word(&Arena(*member.segment).header().asleep);
    }
  }

  std::vector<Segment> segments;
  for (const Member& member : config_.members) {
    if (member.host == here && member.segment) segments.push_back(*member.segment);
  }
  const MembersPtr everyone = make_members(0, std::move(ranks), config_.rank);
  make_set(everyone, std::move(segments));
  stall_inspection_ = std::make_unique<StallInspection>(Topology(hosts).position(config_.rank));
  {
    std::lock_guard lock(mutex_);
    known_sets_.emplace(0, KnownSet{everyone, false, {}});
    state_ = State::kRunning;
    requests_waiting_.store(true);
  }
  state_changed_.notify_all();
  for (auto& [from, message] : std::exchange(early_messages_, {})) dispatch_safely(from, message);
}

// For messages that were kept: their link has done with them.
void Engine::dispatch_safely(int from, std::span<const std::byte> message) {
  try {
    dispatch(from, message);
  } catch (const WireError& error) {
    mesh_->link(from)->fail(std::string("it sent a malformed message: ") + error.what());
  }
}

void Engine::dispatch(int from, std::span<const std::byte> message) {
  Reader reader(message);
  const MessageHead head = read_head(reader);
  switch (head.kind) {
    case MessageKind::kHello:
      throw WireError("it introduced itself twice");
    case MessageKind::kReady: {
      ProcessSet* const set = set_of_message(head.set, from, message);
      if (set == nullptr) break;
      const Ready ready = decode_ready(reader);
      set->negotiator.receive(from, ready);
      tracing_.ready(*set, from, ready);
      break;
    }
    case MessageKind::kDecisions:
    case MessageKind::kLeave:
    case MessageKind::kJoin:
    case MessageKind::kDependencyLabels:
    case MessageKind::kBreak:
    case MessageKind::kHalt:
    case MessageKind::kHalted:
      if (ProcessSet* const set = set_of_message(head.set, from, message)) {
        set->negotiator.receive(from, head.kind, reader);
      }
      break;
    case MessageKind::kFail: {
      const auto found = sets_.find(head.set);
      const Abort failure = decode_abort(reader);
      if (found == sets_.end()) break;  // it was removed meanwhile
      if (!found->second->negotiator.is_root()) throw WireError("this rank is not the set's root");
      found->second->negotiator.fail_all({failure.code, failure.text});
      break;
    }
    case MessageKind::kInspectionRequest:
      reader.expect_end();
      inspection_requested_ = true;
      break;
    case MessageKind::kWakeUp:
      reader.expect_end();
      mesh_->look_at_polled();
      break;
    case MessageKind::kPing:
      reader.expect_end();
      mesh_->send_control(from, encode_pong());
      break;
    case MessageKind::kPong:
      reader.expect_end();
      liveness_.hear(from);
      break;
    case MessageKind::kInspection:
      stall_inspection_->receive_inspection(from, decode_inspection(reader));
      break;
    case MessageKind::kReport:
      stall_inspection_->receive(from, decode_report(reader));
      break;
    case MessageKind::kAbort: {
      const Abort abort = decode_abort(reader);
      throw Error(abort.code, abort.text);
    }
    case MessageKind::kBye:
      reader.expect_end();
      departed_[static_cast<std::size_t>(from)] = true;
      // It waits for this side to close as well.
      mesh_->link(from)->close_write();
      break;
  }
}

}  // namespace horoplug
