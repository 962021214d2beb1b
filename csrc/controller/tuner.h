// Chooses the settings of plans from the times of the job's own steps.
//
// One setting after the other is varied. A plan that is locked for such a trial has several
// choices, and its steps take turns with them, so that whatever else makes the machine slower
// for a while slows down all of them alike. The root times its steps. When each choice has had its
// turns, the plan ends, and what was clearly the fastest is what the next plan has.
//
// Some settings move the borders at which sums are cut into parts, and so the order in which they
// are added up. Those are left alone where that could change a result, unless all is to be tuned.
//
// A state machine, on the root of a process set; times go in.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "collectives/tuning.h"
#include "controller/plan.h"

namespace horoplug {

enum class Autotune { kOff, kSafe, kAll };

// The settings, as bits for those that are to stay as they are.
inline constexpr std::uint32_t kTuneBuckets = 1;
inline constexpr std::uint32_t kTuneChunks = 2;
inline constexpr std::uint32_t kTuneLanes = 4;
inline constexpr std::uint32_t kTuneLatency = 8;

struct TunerOptions {
  Autotune mode = Autotune::kSafe;
  std::uint32_t fixed = 0;
  int warmup = 3;    // turns of each choice that do not count
  int turns = 10;    // that do
  int choices = 20;  // that are tried at most, of all settings together
  std::vector<std::int64_t> buckets{512 << 10, 1 << 20,  2 << 20,  4 << 20,
                                    8 << 20,   16 << 20, 32 << 20, 64 << 20};
  std::vector<std::int64_t> chunks{32 << 10, 64 << 10, 128 << 10, 256 << 10};
  std::vector<std::int64_t> lanes{1, 2, 4, 8};
  std::vector<std::int64_t> latencies{25, 50, 100, 200, 400};
};

// The result of a trial.
struct Trial {
  struct Choice {
    std::int64_t value;
    double seconds;  // median time of a step
  };
  const char* setting;
  std::vector<Choice> choices;  // the first is what it was before
  std::size_t chosen = 0;
  int turns = 0;
  bool given_up = false;  // plans kept ending before the trial did
};

class Tuner {
 public:
  // Where the ranks of the process set are.
  struct Job {
    int ranks = 1;
    bool one_host = true;
    int lanes = 1;
  };
  Tuner(TunerOptions options, const Tuning& start, const Job& job);

  // What the next plan of this step has, for make_plan(): its first choice is the best so far, and
  // if there are more, a trial begins.
  std::vector<PlanChoice> choices(std::span<const StepMember> step,
                                  std::span<const std::uint32_t> labels, std::int64_t limit,
                                  bool fuse_groups);
  // Steps for which each choice has its turn; 0: there is no trial.
  std::uint32_t rounds() const;

  // A step of the plan has ended that had this choice.
  void step_done(std::size_t choice, double now);
  // Each choice has had its turns: the plan should end.
  bool trial_over() const { return trying_ && steps_ >= times_.size() * rounds(); }
  // The plan has ended, whatever the reason.
  void plan_ended();

  const Tuning& best() const { return best_; }
  std::vector<Trial> take_results() { return std::exchange(results_, {}); }

 private:
  struct Setting;
  static const Setting kSettings[];
  struct State {
    const Setting* setting;
    std::optional<std::int64_t> finalist{};  // the only other value that is still to be tried
    int interruptions = 0;
    bool done = false;
  };
  std::vector<Tuning> variants(const State& state) const;
  void settle();

  const TunerOptions options_;
  Tuning best_;
  std::vector<State> open_;
  int tried_ = 0;

  State* trying_ = nullptr;  // nullptr: there is no trial
  std::vector<Tuning> tuned_;
  std::vector<std::vector<double>> times_;  // of steps, by choice
  std::size_t steps_ = 0;
  std::optional<double> last_step_;

  std::vector<Trial> results_;
};

}  // namespace horoplug
