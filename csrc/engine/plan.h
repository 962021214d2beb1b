// A locked plan: batches that run again and again, in an order that all ranks know, without being
// negotiated.
//
// A rank joins a batch when all of its operations are ready here and it is done with the batch
// before; a batch commits when every rank has joined it, which its collective finds out when the
// ranks meet. Nothing that a user handed in is overwritten before that, so that a batch that was
// joined by some can be withdrawn (see Negotiator).
//
// An operation of the plan is known by its key (see StepMember). A key can occur several times in a
// step; what a rank submits under it takes these places in turn.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/survey.h"

namespace horoplug {

using PlanContents = std::vector<std::vector<std::uint32_t>>;  // places in the step, by batch

// Cuts a step into batches. `labels`: by place, equal for operations that may share a batch (see
// Survey). A batch holds at most `limit` bytes, unless one operation has more.
PlanContents make_plan(std::span<const StepMember> step, std::span<const std::uint32_t> labels,
                       std::int64_t limit, bool fuse_groups);

class Plan {
 public:
  // The first batch will have the number `decided` + 1. Throws WireError if the contents are not
  // those of a plan of this step.
  Plan(std::uint32_t epoch, std::uint64_t decided, const std::vector<StepMember>& step,
       const PlanContents& contents);

  std::uint32_t epoch() const { return epoch_; }
  // The number of the last batch that this rank has joined.
  std::uint64_t joined() const { return joined_; }
  std::uint64_t steps_joined() const { return (joined_ - decided_) / batches_.size(); }
  bool running() const { return running_; }

  // This rank is ready to run an operation. False if the plan has no such operation now.
  bool ready(const std::string& name, const Signature& signature);

  // Joins the next batch, if that is possible.
  bool join_next();
  // The names in the batch that was joined last, of which the others may not know yet.
  const std::vector<std::string>& last() const { return last_; }
  void batch_done() { running_ = false; }

  // How many operations must become ready at least before anything can be joined; 0 if none has to:
  // it waits for the batch that runs.
  std::size_t missing() const { return batches_[next_].places.size() - batches_[next_].ready; }

  // Something is ready that can not be joined since a batch before it, or its own, is not complete.
  bool held_up() const { return !running_ && ready_ > 0 && !batches_[next_].complete(); }

 private:
  struct Place {
    std::size_t batch;
    Signature signature;
    bool ready = false;
    std::string name{};  // of what is ready
  };
  struct Batch {
    std::vector<std::uint32_t> places;
    std::size_t ready = 0;
    bool complete() const { return ready == places.size(); }
  };
  struct Turn {
    std::vector<std::uint32_t> places;  // that operations of one key take, in turn
    std::size_t next = 0;
  };

  const std::uint32_t epoch_;
  const std::uint64_t decided_;
  std::uint64_t joined_;
  std::size_t next_ = 0;   // batch
  std::size_t ready_ = 0;  // operations that are ready and not joined
  bool running_ = false;
  std::vector<std::string> last_;
  std::vector<Place> places_;
  std::vector<Batch> batches_;
  std::unordered_map<std::string, Turn> turns_;
};

}  // namespace horoplug
