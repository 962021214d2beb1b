// What agreeing costs: messages and bytes of real negotiators that are joined in memory, for jobs
// of any size. A program of its own; prints one JSON object.
//
//   control_plane_bench RANKS TENSORS BURSTS STEPS [RANKS_PER_HOST [full|symmetric]]
//
// In every step each rank submits all TENSORS, in BURSTS parts; a part is agreed upon by all before
// the next is submitted, so that BURSTS says how often a step has something new to tell.
//
// full: one negotiator per rank. symmetric: one for each shape of subtree. Ranks that have equal
// subtrees and submit the same get equal messages and send equal messages, so that the messages of
// one can stand for those of all others, and are counted once for each of them. The sums are those
// of the full simulation (tests/project/test_benchmarks.py compares them); 65,536 ranks with 1,000
// tensors, which would take some 50 GB, take a few megabytes.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "controller/messages.h"
#include "controller/negotiator.h"
#include "controller/topology.h"

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

// A rank that is simulated, for itself and all ranks with a subtree like its own.
struct Actor {
  explicit Actor(const TreePosition& place) : negotiator(kSet, place, {}) {}

  Negotiator negotiator;
  std::uint64_t stands_for = 1;
  // Where a message to the parent arrives: the actors with such a child, and the child's rank.
  std::vector<std::pair<std::size_t, int>> above;
  std::map<int, std::size_t> below;    // children that are actors
  Traffic traffic;                     // sent and received by one rank, in this step
  std::vector<std::uint32_t> running;  // plans of the batches that are decided and not done
};

class ControlPlane {
 public:
  ControlPlane(int ranks, int ranks_per_host, bool full) {
    std::vector<int> hosts;
    for (int rank = 0; rank < ranks; ++rank) hosts.push_back(rank / ranks_per_host);
    const Topology topology(hosts);
    depth_ = topology.depth();
    std::vector<TreePosition> places;
    for (int rank = 0; rank < ranks; ++rank) places.push_back(topology.position(rank));
    choose_actors(places, shapes_of(places, full));
  }

  struct Step {
    Traffic sent;     // by all ranks
    Traffic busiest;  // sent and received by the rank with most bytes
  };

  Step run(const std::vector<std::string>& names, int bursts) {
    sent_ = {};
    for (Actor& actor : actors_) actor.traffic = {};
    for (int burst = 0; burst < bursts; ++burst, ++dependency_epoch_) {
      const std::size_t begin = names.size() * burst / bursts;
      const std::size_t end = names.size() * (burst + 1) / bursts;
      for (std::size_t i = 0; i < actors_.size(); ++i) {
        for (std::size_t n = begin; n < end; ++n) {
          actors_[i].negotiator.submit(names[n], signature_, dependency_epoch_);
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
  struct Letter {
    std::size_t to;
    int from;
    Bytes message;
  };

  // By rank: a number that is the same for equal subtrees; if full, for no two ranks.
  static std::vector<std::size_t> shapes_of(const std::vector<TreePosition>& places, bool full) {
    std::vector<std::size_t> shapes(places.size());
    std::map<std::vector<std::size_t>, std::size_t> known;
    for (std::size_t rank = places.size(); rank-- > 0;) {  // children have higher ranks
      if (full) {
        shapes[rank] = rank;
        continue;
      }
      std::vector<std::size_t> children;
      for (const int child : places[rank].children) {
        children.push_back(shapes[static_cast<std::size_t>(child)]);
      }
      std::sort(children.begin(), children.end());
      shapes[rank] = known.try_emplace(children, known.size()).first->second;
    }
    return shapes;
  }

  // The first rank of each shape, in the order of their distance from the root, so that the parent
  // of an actor is an actor.
  void choose_actors(const std::vector<TreePosition>& places,
                     const std::vector<std::size_t>& shapes) {
    std::map<std::size_t, std::size_t> actor_of;  // by shape
    std::deque<int> next{0};
    while (!next.empty()) {
      const TreePosition& place = places[static_cast<std::size_t>(next.front())];
      next.pop_front();
      next.insert(next.end(), place.children.begin(), place.children.end());
      const std::size_t shape = shapes[static_cast<std::size_t>(place.rank)];
      const auto [known, is_first] = actor_of.try_emplace(shape, actors_.size());
      if (!is_first) {
        ++actors_[known->second].stands_for;
        continue;
      }
      if (!place.is_root()) {
        const auto parent = shapes[static_cast<std::size_t>(place.parent)];
        actors_[actor_of.at(parent)].below[place.rank] = actors_.size();
      }
      actors_.emplace_back(place);
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

  // Takes what an actor has to say and has decided. True if there was anything.
  bool collect(std::size_t index) {
    Actor& actor = actors_[index];
    bool any = false;
    for (auto& [to, message] : actor.negotiator.take_outgoing()) {
      any = true;
      sent_.add(message.size(), actor.stands_for);
      actor.traffic.add(message.size());
      if (to == actor.negotiator.position().parent) {
        for (const auto& [parent, child] : actor.above)
          (is_answer(message) ? answers_ : letters_).push_back({parent, child, message});
      } else if (const auto child = actor.below.find(to); child != actor.below.end()) {
        letters_.push_back({child->second, actor.negotiator.position().rank, std::move(message)});
      }
    }
    for (const auto& decision : actor.negotiator.take_decisions()) {
      if (decision.kind != DecisionItem::Kind::kBatch)
        throw std::logic_error(decision.status.message);
      any = true;
      actor.running.push_back(decision.plan);
      undecided_ -= decision.names.size();
    }
    return any;
  }

  void deliver(const Letter& letter) {
    Actor& actor = actors_[letter.to];
    actor.traffic.add(letter.message.size());
    Reader reader(letter.message);
    const MessageKind kind = read_head(reader).kind;
    if (!actor.negotiator.receive(letter.from, kind, reader)) {
      throw std::logic_error("a message that agreeing does not need");
    }
    collect(letter.to);
  }

  // Until nobody has anything to say. All messages take equally long, and batches no time at all.
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
      std::vector<Letter> letters = std::exchange(letters_, {});
      if (!any && letters.empty()) letters = std::exchange(answers_, {});
      if (!any && letters.empty()) return;
      for (const Letter& letter : letters) deliver(letter);
    }
  }

  // A small gradient; what it is makes no difference but to fusion.
  const Signature signature_ = [] {
    Signature signature;
    signature.op = OpKind::kAllreduce;
    signature.dtype = DType::kFloat32;
    signature.reduce = ReduceOp::kAverage;
    signature.shapes = {{256, 64}};
    return signature;
  }();
  std::deque<Actor> actors_;
  std::vector<Letter> letters_;
  // An actor stands for ranks near the root and far from it, and answers when the nearest is asked:
  // too early for the parents of the others, so that answers wait until there is nothing else.
  std::vector<Letter> answers_;
  std::uint64_t undecided_ = 0;
  std::uint64_t dependency_epoch_ = 0;  // each burst waits for the one before
  Traffic sent_;
  int depth_ = 0;
};

int argument(char** argv, int index) {
  const long value = std::strtol(argv[index], nullptr, 10);
  if (value < 1) throw std::invalid_argument(std::string("not a positive number: ") + argv[index]);
  return static_cast<int>(value);
}

int run(int argc, char** argv) {
  if (argc < 5 || argc > 7)
    throw std::invalid_argument("RANKS TENSORS BURSTS STEPS [RANKS_PER_HOST [full|symmetric]]");
  const int ranks = argument(argv, 1);
  const int tensors = argument(argv, 2);
  const int bursts = argument(argv, 3);
  const int steps = argument(argv, 4);
  const int per_host = argc > 5 ? argument(argv, 5) : 8;
  const bool full = argc > 6 && std::string(argv[6]) == "full";
  // Names as long as those of real models are.
  std::vector<std::string> names;
  for (int i = 0; i < tensors; ++i) {
    names.push_back("gradient.encoder.layer." + std::to_string(i) + ".weight");
  }
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
