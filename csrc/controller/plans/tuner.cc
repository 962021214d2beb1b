#include "controller/plans/tuner.h"

#include <algorithm>
#include <cmath>

namespace horoplug {
namespace {

// A choice must be faster than the present one by this factor, often enough that chance is
// unlikely.
constexpr double kFaster = 0.98;
constexpr double kMostDoubt = 0.1;
// If it is faster only a little less often, the two are compared once more without the others.
constexpr double kWorthALook = 0.4;
// In a turn, a choice is far ahead of another one if it takes at most this part of its time. A
// trial ends early once one choice has been far ahead of each other one in kTurnsAhead turns:
// further turns would only cost the time of the slow choices. A turn in which it is not takes one
// of these turns back, so that a pause of the program does not hide the lead. Warm-up turns count
// as well, except the first one, in which each choice touches its memory for the first time. The
// present choice needs a smaller lead, because nothing gets slower if it stays.
constexpr double kFarAhead = 0.83;
constexpr double kPresentAhead = 0.95;
constexpr std::size_t kTurnsAhead = 3;
constexpr int kMostInterruptions = 3;

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// The median over all choices, for each turn.
std::vector<double> by_turn(const std::vector<std::vector<double>>& times) {
  std::vector<double> medians;
  for (std::size_t turn = 0; turn < times.front().size(); ++turn) {
    std::vector<double> all;
    for (const auto& of_choice : times) all.push_back(of_choice[turn]);
    medians.push_back(median(std::move(all)));
  }
  return medians;
}

// The probability of at least so many wins between equals: the sign test.
double chance_of(std::size_t wins, std::size_t turns) {
  const auto n = static_cast<double>(turns);
  double sum = 0;
  for (std::size_t k = wins; k <= turns; ++k) {
    const auto won = static_cast<double>(k);
    sum += std::exp(std::lgamma(n + 1) - std::lgamma(won + 1) - std::lgamma(n - won + 1) -
                    n * std::log(2.0));
  }
  return sum;
}

std::int64_t largest_batch(std::span<const StepMember> step, const PlanContents& batches) {
  std::int64_t largest = 0;
  for (const auto& slots : batches) {
    std::int64_t bytes = 0;
    for (const std::uint32_t slot : slots) bytes += payload_bytes(step[slot].signature);
    largest = std::max(largest, bytes);
  }
  return largest;
}

// The first step of a plan begins before the plan and is not timed.
TunerOptions at_least_one(TunerOptions options) {
  options.warmup = std::max(options.warmup, 1);
  options.turns = std::max(options.turns, 1);
  return options;
}

}  // namespace

struct Tuner::Setting {
  const char* name;
  std::uint32_t bit;
  std::int64_t Tuning::* value;
  std::vector<std::int64_t> TunerOptions::* values;
  bool between_hosts = false;  // it has no effect on a single host
  bool moves_borders = false;  // it moves the boundaries between the parts of a reduction
};

const Tuner::Setting Tuner::kSettings[] = {
    {.name = "bucket_bytes",
     .bit = HP_TUNE_BUCKETS,
     .value = &Tuning::bucket_bytes,
     .values = &TunerOptions::buckets,
     .moves_borders = true},
    {.name = "chunk_bytes",
     .bit = HP_TUNE_CHUNKS,
     .value = &Tuning::chunk_bytes,
     .values = &TunerOptions::chunks},
    {.name = "lanes",
     .bit = HP_TUNE_LANES,
     .value = &Tuning::lanes,
     .values = &TunerOptions::lanes,
     .between_hosts = true},
    {.name = "latency_percent",
     .bit = HP_TUNE_ALGORITHMS,
     .value = &Tuning::latency_percent,
     .values = &TunerOptions::latencies,
     .between_hosts = true,
     .moves_borders = true},
};

Tuner::Tuner(TunerOptions options, const Tuning& start, const Placement& placement)
    : options_(at_least_one(std::move(options))), best_(start) {
  best_.lanes = std::min<std::int64_t>(best_.lanes, placement.lanes);
  if (options_.mode == Autotune::kOff || placement.ranks == 1) return;
  // One rank adds all operands in rank order, and two operands have only one order.
  const bool has_one_order = placement.one_host || placement.ranks == 2;
  for (const Setting& setting : kSettings) {
    if ((options_.fixed & setting.bit) != 0 || (setting.between_hosts && placement.one_host))
      continue;
    if (setting.moves_borders && !has_one_order && options_.mode != Autotune::kAll) continue;
    open_.push_back({&setting});
  }
}

std::uint32_t Tuner::rounds() const {
  return trying_ != nullptr ? static_cast<std::uint32_t>(options_.warmup + options_.turns) : 0;
}

// The best settings so far, and the same with other values of one setting.
std::vector<Tuning> Tuner::variants(const State& state) const {
  const Setting& setting = *state.setting;
  std::vector<Tuning> all{best_};
  for (const std::int64_t value : options_.*setting.values) {
    if (state.finalist && value != *state.finalist) continue;
    const bool exists = setting.bit != HP_TUNE_LANES || value <= best_.lanes;
    Tuning other = best_;
    other.*setting.value = value;
    if (exists && other != best_) all.push_back(other);
  }
  return all;
}

std::vector<PlanChoice> Tuner::choices(std::span<const StepMember> step,
                                       std::span<const std::uint32_t> labels, std::int64_t limit,
                                       bool fuse_groups) {
  const auto choice = [&](const Tuning& tuning) {
    return PlanChoice{tuning,
                      make_plan(step, labels, std::min(limit, tuning.bucket_bytes), fuse_groups)};
  };
  for (State& state : open_) {
    if (state.done) continue;
    std::vector<PlanChoice> distinct;
    for (const Tuning& tuning : variants(state)) {
      PlanChoice next = choice(tuning);
      const std::int64_t largest = largest_batch(step, next.batches);
      const auto is_same = [&](const PlanChoice& other) {
        const bool chunks_alike =
            std::min(other.tuning.chunk_bytes, largest) == std::min(tuning.chunk_bytes, largest);
        return other.batches == next.batches && chunks_alike &&
               other.tuning.lanes == tuning.lanes &&
               other.tuning.latency_percent == tuning.latency_percent;
      };
      if (tried_ + static_cast<int>(distinct.size()) > options_.choices) break;
      if (std::none_of(distinct.begin(), distinct.end(), is_same)) {
        distinct.push_back(std::move(next));
      }
    }
    // There is nothing to try for this step; a later step may differ.
    if (distinct.size() < 2) continue;
    trying_ = &state;
    tuned_.clear();
    for (const PlanChoice& tried : distinct) tuned_.push_back(tried.tuning);
    times_.assign(distinct.size(), {});
    steps_ = 0;
    leader_.reset();
    return distinct;
  }
  return {choice(best_)};
}

void Tuner::step_done(std::size_t choice, double now) {
  if (trying_ == nullptr || trial_over()) return;
  const bool is_timed = steps_ >= times_.size();
  if (is_timed) times_[choice].push_back(now - last_step_);
  last_step_ = now;
  ++steps_;
  if (is_timed && steps_ % times_.size() == 0) leader_ = find_leader();
}

std::optional<std::size_t> Tuner::find_leader() const {
  const auto is_far_ahead = [&](std::size_t own, std::size_t other) {
    const double share = own == 0 ? kPresentAhead : kFarAhead;
    std::size_t lead = 0;
    for (std::size_t turn = 0; turn < times_[own].size(); ++turn) {
      const bool wins = times_[own][turn] <= share * times_[other][turn];
      lead = wins ? lead + 1 : lead - std::min<std::size_t>(lead, 1);
    }
    return lead >= kTurnsAhead;
  };
  for (std::size_t i = 0; i < times_.size(); ++i) {
    bool leads = true;
    for (std::size_t other = 0; other < times_.size(); ++other) {
      leads = leads && (other == i || is_far_ahead(i, other));
    }
    if (leads) return i;
  }
  return std::nullopt;
}

void Tuner::plan_ended() {
  if (trying_ == nullptr) return;
  if (trial_over()) {
    settle();
  } else if (++trying_->interruptions >= kMostInterruptions) {
    trying_->done = true;
    results_.push_back({.setting = trying_->setting->name, .choices = {}, .given_up = true});
  }
  trying_ = nullptr;
}

// Keeps the turns that decide the trial.
void Tuner::drop_warmup() {
  const auto turns = leader_ ? kTurnsAhead : static_cast<std::size_t>(options_.turns);
  for (auto& times : times_) {
    times.erase(times.begin(), times.end() - static_cast<std::ptrdiff_t>(turns));
  }
}

void Tuner::settle() {
  drop_warmup();
  Trial trial{.setting = trying_->setting->name,
              .choices = {},
              .turns = static_cast<int>(times_.front().size())};
  // Slowdowns of the machine affect all choices of a turn.
  const std::vector<double> usual = by_turn(times_);
  std::size_t fastest = 0;
  double least = 0;
  for (std::size_t i = 0; i < times_.size(); ++i) {
    trial.choices.push_back({tuned_[i].*trying_->setting->value, median(times_[i])});
    std::vector<double> shares;
    for (std::size_t turn = 0; turn < usual.size(); ++turn) {
      shares.push_back(times_[i][turn] / usual[turn]);
    }
    const double share = median(std::move(shares));
    if (i > 0 && share >= least) continue;
    fastest = i;
    least = share;
  }
  std::size_t wins = 0;
  for (std::size_t turn = 0; turn < usual.size(); ++turn) {
    wins += times_[fastest][turn] < kFaster * times_[0][turn] ? 1 : 0;
  }
  // Of many choices, one is always ahead by chance.
  const double rivals = static_cast<double>(times_.size() - 1);
  const double doubt = chance_of(wins, usual.size());
  const bool is_clear = fastest > 0 && rivals * doubt < kMostDoubt;
  if (leader_ || is_clear) {
    trial.chosen = leader_.value_or(fastest);
    best_ = tuned_[trial.chosen];
    trying_->done = true;
  } else if (fastest > 0 && rivals > 1 && doubt < kWorthALook) {
    trying_->finalist = tuned_[fastest].*trying_->setting->value;
  } else {
    trying_->done = true;
  }
  tried_ += static_cast<int>(times_.size()) - 1;
  results_.push_back(std::move(trial));
}

}  // namespace horoplug
