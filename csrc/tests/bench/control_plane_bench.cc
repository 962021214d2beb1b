// Measures the cost of negotiation: the messages and bytes of real negotiators that are connected
// in memory, for jobs of any size. Prints one JSON object.
//
//   control_plane_bench RANKS TENSORS BURSTS STEPS [RANKS_PER_HOST [full|symmetric]]
//   control_plane_bench inspection RANKS PENDING [RANKS_PER_HOST]
//
// The second form measures a stall inspection: every rank has PENDING operations for which the last
// rank is missing, waits for the last of them, and every tenth rank lacks the one before it.
//
// The first form measures steps.
//
// In every step each rank submits all TENSORS, in BURSTS parts. All ranks agree on a part before
// they submit the next one, so BURSTS is the number of negotiations per step.
//
// full: one negotiator per rank. symmetric: one negotiator per shape of subtree. Ranks that have
// equal subtrees and submit the same operations receive and send equal messages. The messages of
// one rank therefore represent those of all such ranks, and are counted once for each. The totals
// equal those of the full simulation (tests/project/test_benchmarks.py compares them). The full
// simulation of 65,536 ranks with 1,000 tensors would take about 50 GB, the symmetric one takes a
// few megabytes.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "controller/messages/messages.h"
#include "controller/negotiator.h"
#include "controller/stalls/stall_diagnosis.h"
#include "controller/state/topology.h"
#include "harness/simulated_inspection.h"

namespace {

using namespace horoplug;

constexpr std::uint32_t kSet = 0;

struct Traffic {
  std::uint64_t messages = 0;
  std::uint64_t bytes = 0;

  void add(std::size_t size, std::uint64_t times = 1) {
    messages += times;
    bytes += size * times;
  }
};

// A simulated rank. It represents all ranks with an equal subtree.
struct Actor {
  explicit Actor(const TreePosition& position) : negotiator(kSet, position, {}) {}

  Negotiator negotiator;
  std::uint64_t represented = 1;  // the number of ranks that it represents
  // The receivers of a message to the parent: actors that have such a child, and the child's rank.
  std::vector<std::pair<std::size_t, int>> above;
  std::map<int, std::size_t> below;    // the children that are actors
  Traffic traffic;                     // sent and received by one rank in this step
  std::vector<std::uint32_t> running;  // the plans of decided batches that are not done
};

class ControlPlane {
 public:
  ControlPlane(int ranks, int ranks_per_host, bool full) {
    std::vector<int> hosts;
    for (int rank = 0; rank < ranks; ++rank) hosts.push_back(rank / ranks_per_host);
    const Topology topology(hosts);
    depth_ = topology.depth();
    std::vector<TreePosition> positions;
    for (int rank = 0; rank < ranks; ++rank) positions.push_back(topology.position(rank));
    choose_actors(positions, shapes_of(positions, full));
  }

  struct Step {
    Traffic sent;     // by all ranks
    Traffic busiest;  // sent and received by the rank with the most bytes
  };

  Step run(const std::vector<std::string>& names, int bursts) {
    sent_ = {};
    for (Actor& actor : actors_) actor.traffic = {};
    for (int burst = 0; burst < bursts; ++burst, ++dependency_stage_) {
      const std::size_t begin = names.size() * burst / bursts;
      const std::size_t end = names.size() * (burst + 1) / bursts;
      for (std::size_t i = 0; i < actors_.size(); ++i) {
        for (std::size_t n = begin; n < end; ++n) {
          actors_[i].negotiator.submit(make_identity(names[n], signature_), dependency_stage_);
          ++undecided_;
        }
        collect(i);
      }
      settle();
      if (undecided_ != 0) throw std::logic_error("a rank was left without a decision");
    }
    Step step{sent_, {}};
    for (const Actor& actor : actors_) {
      if (actor.traffic.bytes > step.busiest.bytes) step.busiest = actor.traffic;
    }
    return step;
  }

  std::size_t actors() const { return actors_.size(); }
  int depth() const { return depth_; }

 private:
  struct Delivery {
    std::size_t to;
    int from;
    Bytes message;
  };

  // Returns a number for each rank. Equal subtrees have equal numbers; if `full`, all numbers
  // differ.
  static std::vector<std::size_t> shapes_of(const std::vector<TreePosition>& positions, bool full) {
    std::vector<std::size_t> shapes(positions.size());
    std::map<std::vector<std::size_t>, std::size_t> known;
    for (std::size_t rank = positions.size(); rank-- > 0;) {  // children have higher ranks
      if (full) {
        shapes[rank] = rank;
        continue;
      }
      std::vector<std::size_t> children;
      for (const int child : positions[rank].children) {
        children.push_back(shapes[static_cast<std::size_t>(child)]);
      }
      std::sort(children.begin(), children.end());
      shapes[rank] = known.try_emplace(children, known.size()).first->second;
    }
    return shapes;
  }

  // Makes the first rank of each shape an actor. Ranks are visited in the order of their distance
  // from the root, so that the parent of an actor is an actor.
  void choose_actors(const std::vector<TreePosition>& positions,
                     const std::vector<std::size_t>& shapes) {
    std::map<std::size_t, std::size_t> actor_of;  // by shape
    std::deque<int> next{0};
    while (!next.empty()) {
      const TreePosition& position = positions[static_cast<std::size_t>(next.front())];
      next.pop_front();
      next.insert(next.end(), position.children.begin(), position.children.end());
      const std::size_t shape = shapes[static_cast<std::size_t>(position.rank)];
      const auto [known, is_first] = actor_of.try_emplace(shape, actors_.size());
      if (!is_first) {
        ++actors_[known->second].represented;
        continue;
      }
      if (!position.is_root()) {
        const auto parent = shapes[static_cast<std::size_t>(position.parent)];
        actors_[actor_of.at(parent)].below[position.rank] = actors_.size();
      }
      actors_.emplace_back(position);
    }
    for (std::size_t i = 0; i < actors_.size(); ++i) {
      for (const int child : actors_[i].negotiator.position().children) {
        const std::size_t shape = shapes[static_cast<std::size_t>(child)];
        actors_[actor_of.at(shape)].above.emplace_back(i, child);
      }
    }
  }

  static bool is_answer(const Bytes& message) {
    Reader reader(message);
    return read_head(reader).kind == MessageKind::kDependencyLabels;
  }

  // Collects the messages and decisions of an actor. Returns whether there were any.
  bool collect(std::size_t index) {
    Actor& actor = actors_[index];
    bool any = false;
    for (auto& [to, message] : actor.negotiator.take_outgoing()) {
      any = true;
      sent_.add(message.size(), actor.represented);
      actor.traffic.add(message.size());
      if (to == actor.negotiator.position().parent) {
        for (const auto& [parent, child] : actor.above)
          (is_answer(message) ? answers_ : deliveries_).push_back({parent, child, message});
      } else if (const auto child = actor.below.find(to); child != actor.below.end()) {
        deliveries_.push_back(
            {child->second, actor.negotiator.position().rank, std::move(message)});
      }
    }
    for (const auto& decision : actor.negotiator.take_decisions()) {
      if (decision.kind != DecisionItem::Kind::kBatch)
        throw std::logic_error(decision.status.message);
      any = true;
      actor.running.push_back(decision.plan);
      undecided_ -= decision.operations.size();
    }
    return any;
  }

  void deliver(const Delivery& delivery) {
    Actor& actor = actors_[delivery.to];
    actor.traffic.add(delivery.message.size());
    Reader reader(delivery.message);
    const MessageKind kind = read_head(reader).kind;
    if (!actor.negotiator.receive(delivery.from, kind, reader)) {
      throw std::logic_error("a message that is not part of a negotiation");
    }
    collect(delivery.to);
  }

  // Delivers messages until none is left. All messages take the same time, and batches take none.
  void settle() {
    for (;;) {
      bool any = false;
      for (std::size_t i = 0; i < actors_.size(); ++i) {
        for (const std::uint32_t plan : std::exchange(actors_[i].running, {})) {
          actors_[i].negotiator.batch_done(plan);
        }
        actors_[i].negotiator.flush();
        any |= collect(i);
      }
      std::vector<Delivery> deliveries = std::exchange(deliveries_, {});
      if (!any && deliveries.empty()) deliveries = std::exchange(answers_, {});
      if (!any && deliveries.empty()) return;
      for (const Delivery& delivery : deliveries) deliver(delivery);
    }
  }

  // A small gradient. Its shape only affects fusion.
  const Signature signature_ = [] {
    Signature signature;
    signature.op = OpKind::kAllreduce;
    signature.dtype = DType::kFloat32;
    signature.reduce = ReduceOp::kAverage;
    signature.shapes = {{256, 64}};
    return signature;
  }();
  std::deque<Actor> actors_;
  std::vector<Delivery> deliveries_;
  // Answers to dependency queries, which are delivered only when there is no other message. An
  // actor represents ranks at several distances from the root and answers when the query reaches
  // the nearest one, which is too early for the parents of the others.
  std::vector<Delivery> answers_;
  std::uint64_t undecided_ = 0;
  std::uint64_t dependency_stage_ = 0;  // grows with each burst, because it waits for the last one
  Traffic sent_;
  int depth_ = 0;
};

int argument(char** argv, int index) {
  const long value = std::strtol(argv[index], nullptr, 10);
  if (value < 1) throw std::invalid_argument(std::string("not a positive number: ") + argv[index]);
  return static_cast<int>(value);
}

// The names are as long as those of real models.
std::string name_of(int tensor) {
  return "gradient.encoder.layer." + std::to_string(tensor) + ".weight";
}

int run_inspection(int argc, char** argv) {
  if (argc < 4 || argc > 5)
    throw std::invalid_argument("inspection RANKS PENDING [RANKS_PER_HOST]");
  const int ranks = argument(argv, 2);
  const int pending = argument(argv, 3);
  SimulatedInspection job(ranks, argc > 4 ? argument(argv, 4) : 8);
  const auto state = [&](int rank) {
    RankReport report;
    report.rank = rank;
    report.quiet = Seconds(10);
    for (int i = 0; i < pending && rank != ranks - 1; ++i) {
      if (i == pending - 2 && rank % 10 == 0) continue;
      report.pending.push_back({.set = 0,
                                .name = name_of(i),
                                .age = Seconds(10 - i * 1e-4),
                                .waited = i == pending - 1});
    }
    return report;
  };
  const auto start = std::chrono::steady_clock::now();
  const Report report = job.run(state);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  const Diagnosis diagnosis =
      diagnose(report, {.members = {{kSet, job.ranks()}}, .stall_time = Seconds(5)});
  const std::chrono::duration<double> all = std::chrono::steady_clock::now() - start;
  const auto number = [](std::uint64_t value) { return static_cast<unsigned long long>(value); };
  std::printf("{\"ranks\": %d, \"pending\": %d, \"messages\": %llu, \"bytes\": %llu, ", ranks,
              pending, number(job.messages()), number(job.bytes()));
  std::printf("\"largest_message\": %zu, \"busiest_bytes\": %llu, \"stalls\": %zu, ", job.largest(),
              number(job.busiest()), diagnosis.stalls.size());
  std::printf("\"seconds\": %.3f, \"diagnosis_seconds\": %.6f}\n", seconds.count(),
              (all - seconds).count());
  return 0;
}

int run(int argc, char** argv) {
  if (argc > 1 && std::string(argv[1]) == "inspection") return run_inspection(argc, argv);
  if (argc < 5 || argc > 7)
    throw std::invalid_argument("RANKS TENSORS BURSTS STEPS [RANKS_PER_HOST [full|symmetric]]");
  const int ranks = argument(argv, 1);
  const int tensors = argument(argv, 2);
  const int bursts = argument(argv, 3);
  const int steps = argument(argv, 4);
  const int per_host = argc > 5 ? argument(argv, 5) : 8;
  const bool full = argc > 6 && std::string(argv[6]) == "full";
  std::vector<std::string> names;
  for (int i = 0; i < tensors; ++i) names.push_back(name_of(i));
  std::size_t name_bytes = 0;
  for (const auto& name : names) name_bytes += name.size();

  const auto start = std::chrono::steady_clock::now();
  ControlPlane plane(ranks, per_host, full);
  std::printf("{\"ranks\": %d, \"tensors\": %d, \"bursts\": %d, \"ranks_per_host\": %d, ", ranks,
              tensors, bursts, per_host);
  std::printf("\"simulated\": %zu, \"depth\": %d, \"name_bytes\": %zu, \"steps\": [",
              plane.actors(), plane.depth(), name_bytes);
  for (int i = 0; i < steps; ++i) {
    const auto step = plane.run(names, bursts);
    const auto number = [](std::uint64_t value) { return static_cast<unsigned long long>(value); };
    std::printf("%s{\"messages\": %llu, \"bytes\": %llu, \"busiest_messages\": %llu, ",
                i > 0 ? ", " : "", number(step.sent.messages), number(step.sent.bytes),
                number(step.busiest.messages));
    std::printf("\"busiest_bytes\": %llu}", number(step.busiest.bytes));
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  std::printf("], \"seconds\": %.3f}\n", seconds.count());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "control_plane_bench: %s\n", error.what());
    return 2;
  }
}
