// Chooses the settings of plans by timing the job's own steps.
//
// One setting is varied at a time. A plan that is installed for such a trial has several choices,
// which its steps use in turn, so that a temporary slowdown of the machine affects all choices
// alike. The root times its steps. When each choice has had its turns, or one of them is far ahead
// of all others, the plan ends, and the next plan uses the choice that was clearly the fastest.
//
// Some settings move the boundaries at which reductions are divided among ranks, and so the order
// of additions. They are left unchanged where that could change a result, unless the mode is kAll.
//
// This is a state machine on the root of a process set. Times are passed in.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "collectives/tuning.h"
#include "controller/plans/plan.h"

namespace horoplug {

enum class Autotune { kOff, kSafe, kAll };

struct TunerOptions {
  Autotune mode = Autotune::kSafe;
  std::uint32_t fixed = 0;  // settings that must not be changed: a sum of hp_tunable
  int warmup = 3;           // turns of each choice that count only if one choice is far ahead
  int turns = 10;           // further turns of each choice, unless one is far ahead before
  int choices = 20;         // limit for the choices of all settings together
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
    double seconds;  // median duration of a step
  };
  const char* setting;
  std::vector<Choice> choices;  // the first is the previous setting
  std::size_t chosen = 0;
  int turns = 0;          // that decided it
  bool given_up = false;  // plans kept ending before the trial was complete
};

class Tuner {
 public:
  // Where the ranks of the process set are, and how they are connected.
  struct Placement {
    int ranks = 1;
    bool one_host = true;
    int lanes = 1;
  };
  Tuner(TunerOptions options, const Tuning& start, const Placement& placement);

  // The choices of the next plan for this step, for make_plan(). The first is the best so far; if
  // there are more, a trial begins.
  std::vector<PlanChoice> choices(std::span<const StepMember> step,
                                  std::span<const std::uint32_t> labels, std::int64_t limit,
                                  bool fuse_groups);
  // The number of turns of each choice; 0: no trial.
  std::uint32_t rounds() const;

  // A step of the plan that used this choice has ended.
  void step_done(std::size_t choice, double now);
  // Each choice has had its turns, or one is far ahead, so the plan should end.
  bool trial_over() const { return trying_ && (leader_ || steps_ >= times_.size() * rounds()); }
  // The plan has ended, for whatever reason.
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
  std::optional<std::size_t> find_leader() const;
  void drop_warmup();
  void settle();

  const TunerOptions options_;
  Tuning best_;
  std::vector<State> open_;
  int tried_ = 0;

  State* trying_ = nullptr;  // nullptr: no trial
  std::vector<Tuning> tuned_;
  std::vector<std::vector<double>> times_;  // durations of steps after the first turn, by choice
  std::size_t steps_ = 0;
  double last_step_ = 0;
  std::optional<std::size_t> leader_;  // the choice that is far ahead of all others

  std::vector<Trial> results_;
};

}  // namespace horoplug
