// Tests of the tuner with simulated machines: it finds the best settings, and it does not change
// those that it must keep.
#include "controller/plans/tuner.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <random>

#include "harness/cluster.h"
#include "harness/programs.h"

using namespace horoplug;
using namespace horoplug::testing;

namespace {

constexpr std::int64_t kLimit = 128 << 20;

// The time of a step, in seconds.
using Machine = std::function<double(const Tuning&, std::size_t step)>;

// A program whose step has `count` operations of `bytes` bytes each.
class Training {
 public:
  Training(int count, std::int64_t bytes) : labels_(static_cast<std::size_t>(count), 0) {
    for (int i = 0; i < count; ++i) {
      step_.push_back({"grad" + std::to_string(i), sum_of(bytes / 4), 0});
    }
  }

  std::vector<PlanChoice> choices_of(Tuner& tuner, std::int64_t limit = kLimit) const {
    return tuner.choices(step_, labels_, limit, true);
  }

  // Runs plans until one has a single choice, and returns the results of the trials.
  std::vector<Trial> run(Tuner& tuner, const Machine& machine) {
    std::vector<Trial> trials;
    while (true) {
      const auto choices = choices_of(tuner);
      if (choices.size() == 1) return trials;
      Plan plan(step_);
      plan.set_choices(choices, tuner.rounds());
      plan.begin(1, 0);
      while (!tuner.trial_over()) {
        REQUIRE(steps_ < 10'000);
        // Not checked one by one, which would take most of the test's time.
        bool ready = true;
        for (const StepMember& member : step_)
          ready &= plan.ready(make_identity(member.key, member.signature)) == Plan::Place::kFound;
        REQUIRE(ready);
        while (plan.join_next()) plan.batch_done();
        REQUIRE(plan.at_step_end());
        now_ += machine(plan.last_tuning(), steps_++);
        tuner.step_done(plan.last_choice(), now_);
      }
      tuner.plan_ended();
      for (Trial& trial : tuner.take_results()) trials.push_back(std::move(trial));
    }
  }
  std::size_t steps() const { return steps_; }

 private:
  std::vector<StepMember> step_;
  std::vector<std::uint32_t> labels_;
  double now_ = 5;
  std::size_t steps_ = 0;
};

// A machine that is fastest with buckets of 2 MiB and chunks of 64 KiB.
double bowl(const Tuning& tuning) {
  const double bucket = std::log2(static_cast<double>(tuning.bucket_bytes) / (2 << 20));
  const double chunk = std::log2(static_cast<double>(tuning.chunk_bytes) / (64 << 10));
  return 0.1 + 0.01 * bucket * bucket + 0.01 * chunk * chunk;
}

}  // namespace

TEST_CASE("the tuner finds the best settings on a noisy and changing machine") {
  const std::uint64_t seed = test_seed();
  constexpr int kRounds = 50;
  int wrong = 0;
  for (std::uint64_t round = 0; round < kRounds; ++round) {
    CAPTURE(seed);
    CAPTURE(round);
    Random random(seed + round);
    std::normal_distribution<double> noise(1, 0.02);
    const std::size_t slow_from = static_cast<std::size_t>(below(random, 150));
    Tuner tuner({}, {}, {.ranks = 4});
    const auto trials =
        Training(40, 512 << 10).run(tuner, [&](const Tuning& tuning, std::size_t step) {
          const double pause = chance(random, 40) ? 1.0 : 0.0;
          return bowl(tuning) * noise(random) * (step >= slow_from ? 3 : 1) + pause;
        });
    REQUIRE(trials.size() >= 2);
    const Tuning& best = tuner.best();
    wrong += best.bucket_bytes != 2 << 20 || best.chunk_bytes != 64 << 10 ? 1 : 0;
  }
  // The pauses can hit one setting in so many of its ten turns that another one is chosen. That
  // happens in about one round of 10,000.
  CHECK(wrong <= 2);
}

TEST_CASE("the tuner keeps a setting unless another one is clearly better") {
  Random random(test_seed());
  std::normal_distribution<double> noise(1, 0.1);
  constexpr int kRounds = kSlowedDown ? 200 : 800;
  int changes = 0;
  for (int round = 0; round < kRounds; ++round) {
    Tuner tuner({}, {}, {.ranks = 4});
    Training(40, 1 << 20).run(tuner, [&](const Tuning&, std::size_t) { return noise(random); });
    changes += tuner.best() != Tuner({}, {}, {.ranks = 4}).best();
  }
  // Both trials together are wrong in less than one of ten rounds. With fewer rounds, under a
  // sanitizer, the estimate is less precise.
  CHECK(changes < kRounds / (kSlowedDown ? 5 : 10));

  // A setting that is always better, but only slightly.
  Tuner tuner({}, {}, {.ranks = 4});
  Training(1, 1 << 20).run(tuner, [](const Tuning& tuning, std::size_t) {
    return tuning.chunk_bytes == 64 << 10 ? 0.99 : 1.0;
  });
  CHECK(tuner.best() == Tuner({}, {}, {.ranks = 4}).best());
}

TEST_CASE("a trial ends early if one choice is far ahead of all others") {
  Random random(test_seed());
  std::normal_distribution<double> noise(1, 0.01);
  // The turns of a trial of chunk sizes in which `others` is the time of all but the best. In the
  // first turn, the best one is slow.
  const auto trial_of = [&](std::int64_t best, double others) {
    Tuner tuner({}, {}, {.ranks = 4});
    Training program(1, 1 << 20);  // only its chunks can differ
    REQUIRE(program.choices_of(tuner).size() == 4);
    const auto trials = program.run(tuner, [&](const Tuning& tuning, std::size_t step) {
      const double least = step < 4 ? 9 : 1;
      return (tuning.chunk_bytes == best ? least : others) * noise(random);
    });
    REQUIRE(trials.size() == 1);
    const Trial& trial = trials.front();
    CHECK(trial.choices[trial.chosen].value == best);
    CHECK(tuner.best().chunk_bytes == best);
    return std::pair(trial.turns, program.steps() / 4);
  };
  using Turns = std::pair<int, std::size_t>;
  constexpr std::int64_t kPresent = 256 << 10;
  const Turns early{3, 1 + 3};
  const Turns late{10, 3 + 10};
  CHECK(trial_of(64 << 10, 1.6) == early);
  CHECK(trial_of(64 << 10, 1.12) == late);
  CHECK(trial_of(kPresent, 1.6) == early);
  CHECK(trial_of(kPresent, 1.12) == early);
  CHECK(trial_of(kPresent, 1.04) == late);
}

TEST_CASE("a trial ends early although the program pauses after every sixth step") {
  for (std::size_t first = 0; first < 6; ++first) {
    CAPTURE(first);
    Tuner tuner({}, {}, {.ranks = 4});
    Training program(1, 1 << 20);  // only its chunks can differ
    const auto trials = program.run(tuner, [&](const Tuning& tuning, std::size_t step) {
      return (tuning.chunk_bytes == 256 << 10 ? 1.0 : 1.3) + (step % 6 == first ? 100.0 : 0.0);
    });
    REQUIRE(trials.size() == 1);
    CHECK(tuner.best().chunk_bytes == 256 << 10);
    CHECK(program.steps() <= 4 * (1 + 5));
  }
}

TEST_CASE(
    "the choice that is far ahead in the last turns of a trial wins over one that was faster "
    "before") {
  Tuner tuner({}, {}, {.ranks = 4});
  Training program(1, 1 << 20);  // only its chunks can differ
  const std::size_t choices = program.choices_of(tuner).size();
  const std::size_t change = choices * (3 + 6);
  const auto trials = program.run(tuner, [&](const Tuning& tuning, std::size_t step) {
    const std::int64_t fastest = step < change ? 128 << 10 : 64 << 10;
    return tuning.chunk_bytes == fastest ? (step < change ? 0.9 : 0.5) : 1.0;
  });
  REQUIRE(trials.size() == 1);
  CHECK(trials.front().turns == 3);
  CHECK(program.steps() == change + choices * 3);
  CHECK(tuner.best().chunk_bytes == 64 << 10);
}

TEST_CASE("warm-up turns of a trial are not measured") {
  TunerOptions options;
  options.warmup = 6;
  Tuner tuner(options, {}, {.ranks = 4});
  Training program(1, 1 << 20);  // only its chunks can differ
  const std::size_t warm = program.choices_of(tuner).size() * 6;
  const auto trials = program.run(tuner, [&](const Tuning& tuning, std::size_t step) {
    const bool best = tuning.chunk_bytes == 64 << 10;
    return step < warm ? (best ? 9.0 : 1.0) : (best ? 0.9 : 1.0);
  });
  CHECK(trials.size() == 1);
  CHECK(tuner.best().chunk_bytes == 64 << 10);
}

TEST_CASE("choices stay within the available lanes, chunks and buckets") {
  TunerOptions options;
  options.mode = Autotune::kAll;
  options.choices = 100;
  Tuner tuner(options, {}, {.ranks = 4, .one_host = false, .lanes = 2});
  for (const Trial& trial :
       Training(40, 1 << 20).run(tuner, [](const Tuning&, std::size_t) { return 1.0; })) {
    if (trial.setting != std::string("lanes")) continue;
    for (const auto& choice : trial.choices) CHECK(choice.value <= 2);
  }
  // The user's HOROVOD_FUSION_THRESHOLD limits the buckets.
  Tuner other(options, {}, {.ranks = 4});
  for (const PlanChoice& choice : Training(40, 256 << 10).choices_of(other, 1 << 20)) {
    for (const auto& batch : choice.batches) CHECK(batch.size() <= 4);
  }
}

TEST_CASE("settings that could change a result are tuned in mode kAll only") {
  const auto tuned = [](const TunerOptions& options, const Tuner::Placement& placement) {
    Tuner tuner(options, {}, placement);
    std::vector<std::string> names;
    for (const Trial& trial :
         Training(40, 1 << 20).run(tuner, [](const Tuning&, std::size_t) { return 1.0; })) {
      names.emplace_back(trial.setting);
    }
    return names;
  };
  using Names = std::vector<std::string>;
  const Tuner::Placement one_host{.ranks = 8};
  const Tuner::Placement two_ranks{.ranks = 2, .one_host = false, .lanes = 4};
  const Tuner::Placement hosts{.ranks = 4, .one_host = false, .lanes = 4};
  TunerOptions all;
  all.mode = Autotune::kAll;
  all.choices = 100;
  TunerOptions some;
  some.choices = 100;
  CHECK(tuned(some, one_host) == Names{"bucket_bytes", "chunk_bytes"});
  CHECK(tuned(some, two_ranks) == Names{"bucket_bytes", "chunk_bytes", "lanes", "latency_percent"});
  CHECK(tuned(some, hosts) == Names{"chunk_bytes", "lanes"});
  CHECK(tuned(all, hosts) == Names{"bucket_bytes", "chunk_bytes", "lanes", "latency_percent"});
  CHECK(tuned(all, one_host) == Names{"bucket_bytes", "chunk_bytes"});
  CHECK(tuned(all, {.ranks = 1}).empty());
  all.fixed = HP_TUNE_BUCKETS | HP_TUNE_LANES;
  CHECK(tuned(all, hosts) == Names{"chunk_bytes", "latency_percent"});
  all.mode = Autotune::kOff;
  CHECK(tuned(all, hosts).empty());
}

TEST_CASE("no trial starts if all choices are equal") {
  Tuner tuner({}, {}, {.ranks = 4});
  // With any settings, all operations share one batch of one chunk.
  CHECK(Training(3, 4096).choices_of(tuner).size() == 1);
  CHECK(tuner.rounds() == 0);
  tuner.step_done(0, 1.0);
  tuner.plan_ended();
  CHECK(tuner.take_results().empty());
  // Another step may have different choices.
  CHECK(Training(40, 1 << 20).choices_of(tuner).size() > 1);
}

TEST_CASE("tuning gives up if plans keep breaking") {
  Tuner tuner({}, {}, {.ranks = 4});
  const Training program(1, 1 << 20);  // only its chunks can differ
  for (int i = 0; i < 3; ++i) {
    CHECK(program.choices_of(tuner).size() == 4);
    tuner.step_done(0, 1.0);
    tuner.plan_ended();
  }
  CHECK(program.choices_of(tuner).size() == 1);
  const auto results = tuner.take_results();
  REQUIRE(results.size() == 1);
  CHECK(results.front().given_up);
  CHECK(tuner.best().chunk_bytes == 256 << 10);
}

TEST_CASE("the number of tried choices is limited") {
  TunerOptions options;
  options.choices = 4;
  Tuner tuner(options, {}, {.ranks = 4});
  std::size_t tried = 0;
  for (const Trial& trial :
       Training(40, 1 << 20).run(tuner, [](const Tuning&, std::size_t) { return 1.0; })) {
    tried += trial.choices.size() - 1;
  }
  CHECK(tried <= 4);
}

TEST_CASE("a trial on real engines ends with equal settings and results on all ranks") {
  for (const Transport transport : kTransports) {
    if (kSlowedDown && transport != Transport::kShm && transport != Transport::kTcp) continue;
    CAPTURE(transport_name(transport));
    constexpr int kRanks = 3;
    EngineOptions options = test_options();
    options.autotune = true;
    options.autotune_warmup = 1;
    options.autotune_steps = 2;
    options.autotune_samples = 100;
    options.tuner.buckets = {1000, 3000};
    options.tuner.chunks = {4096, 64 << 10};
    Cluster cluster(transport, kRanks, options, transport == Transport::kTcp ? 3 : 1);
    std::vector<std::vector<float>> tensors(kRanks, std::vector<float>(100'000));
    std::vector<std::vector<float>> small(kRanks, std::vector<float>(500));
    // More than enough for four trials and for the steps between them.
    for (int step = 0; step < 120; ++step) {
      cluster.run([&](int rank) {
        auto& tensor = tensors[static_cast<std::size_t>(rank)];
        auto& other = small[static_cast<std::size_t>(rank)];
        std::iota(tensor.begin(), tensor.end(), static_cast<float>(rank + step));
        std::fill(other.begin(), other.end(), static_cast<float>(rank));
        Engine& engine = cluster.engine(rank);
        std::vector<hp_handle> handles;
        for (int i = 0; i < 3; ++i) {
          auto& data = i == 1 ? tensor : other;
          Order order;
          order.name = "t" + std::to_string(i);
          order.shape = {static_cast<std::int64_t>(i == 1 ? data.size() : data.size() / 2)};
          order.input = order.output = i == 2 ? data.data() + data.size() / 2 : data.data();
          handles.push_back(submit(engine, order));
        }
        for (const hp_handle handle : handles) await(engine, handle);
      });
      for (int rank = 0; rank < kRanks; ++rank) {
        const auto& tensor = tensors[static_cast<std::size_t>(rank)];
        for (std::size_t i = 0; i < tensor.size(); i += 777) {
          REQUIRE(tensor[i] == static_cast<float>(3 * i) + 3.0F * static_cast<float>(step) + 3.0F);
        }
        const auto& other = small[static_cast<std::size_t>(rank)];
        REQUIRE(std::count(other.begin(), other.end(), 3.0F) == std::ssize(other));
      }
    }
    for (int rank = 0; rank < kRanks; ++rank) {
      const hp_stats stats = cluster.engine(rank).stats();
      CHECK(stats.broken_plans >= 2);  // the tuner ends the plans of its trials
      CHECK(stats.planned_batches > 50);
    }
  }
}
