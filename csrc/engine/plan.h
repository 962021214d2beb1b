// A locked plan: batches that run again and again, in an order that all ranks know, without being
// negotiated.
//
// A rank joins a batch when all of its operations are ready here and it is done with the batch
// before; a batch commits when every rank has joined it, which its collective finds out when the
// ranks meet. Nothing that a user handed in is overwritten before that, so that a batch that was
// joined by some can be withdrawn (see Negotiator).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/name_table.h"

namespace horoplug {

using PlanContents = std::vector<std::vector<std::uint32_t>>;  // batches of numbers

// Cuts a step into batches. `order`: the numbers of its operations as they became ready; `labels`:
// by place, equal for operations that may share a batch (see Survey). A batch holds at most `limit`
// bytes, unless one operation has more.
PlanContents make_plan(std::span<const std::uint32_t> order, std::span<const std::uint32_t> labels,
                       const NameTable& table, std::int64_t limit, bool fuse_groups);

class Plan {
 public:
  using Names = std::shared_ptr<const std::vector<std::string>>;

  // The first batch will have the number `decided` + 1. Throws WireError if the contents are not
  // those of a plan over this table.
  Plan(std::uint32_t epoch, std::uint64_t decided, const PlanContents& contents,
       const NameTable& table);

  std::uint32_t epoch() const { return epoch_; }
  // The number of the last batch that this rank has joined.
  std::uint64_t joined() const { return joined_; }
  std::uint64_t steps_joined() const { return (joined_ - decided_) / batches_.size(); }
  std::size_t batches_per_step() const { return batches_.size(); }
  bool running() const { return running_; }

  // This rank is ready to run an operation. False if the plan has no such operation.
  bool ready(const std::string& name, const Signature& signature);
  // Whether an operation belongs to the plan.
  bool has(const std::string& name, const Signature& signature) const;

  // Joins the next batch if that is possible and returns its names; nullptr otherwise.
  Names join_next();
  // The batch that was joined last, of which the others may not know yet.
  const Names& last() const { return last_; }
  void batch_done() { running_ = false; }

  // Something is ready that can not be joined since a batch before it, or its own, is not complete.
  bool held_up() const { return !running_ && ready_ > 0 && !next().complete(); }

 private:
  struct Member {
    std::size_t batch;
    Signature signature;
    bool ready = false;
  };
  struct PlannedBatch {
    Names names;
    std::size_t ready = 0;
    bool complete() const { return ready == names->size(); }
  };
  const PlannedBatch& next() const { return batches_[next_]; }

  const std::uint32_t epoch_;
  const std::uint64_t decided_;
  std::uint64_t joined_;
  std::size_t next_ = 0;
  std::size_t ready_ = 0;  // operations that are ready and not joined
  bool running_ = false;
  Names last_;
  std::vector<PlannedBatch> batches_;
  std::unordered_map<std::string, Member> members_;
};

}  // namespace horoplug
