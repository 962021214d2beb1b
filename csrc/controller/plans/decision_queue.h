// What the root of a tree has still to decide: batches of operations that are ready on all ranks,
// errors, and the end of the set.
//
// The queue numbers batches, fuses operations into them, and limits how many are decided and not
// yet done: what becomes ready meanwhile collects here and forms the next, larger batch. It also
// decides which names get an id (see NameTable).
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "base/status.h"
#include "controller/messages/messages.h"
#include "controller/state/fusion.h"
#include "controller/state/name_table.h"

namespace horoplug {

class DecisionQueue {
 public:
  struct Options {
    std::int64_t fusion_threshold;
    bool fuse_groups;
    std::size_t cache_capacity;  // ids
    int max_outstanding;         // batches that are decided and not done on this rank
  };
  struct Batch {
    std::vector<ReadyOperation> operations;
    DecisionItem item;
  };

  explicit DecisionQueue(const Options& options) : options_(options) {}

  // ---- errors and the end of the set, which wait for nothing

  void add_error(const std::string& name, Status error);
  // `rank`: the rank that leaves, or kSetRemoved.
  void add_end(int rank);
  // Both return the items since the last call, in order.
  std::vector<DecisionItem> take_errors() { return std::exchange(errors_, {}); }
  std::vector<DecisionItem> take_ends() { return std::exchange(ends_, {}); }

  // ---- batches

  void add(ReadyOperation operation) { ready_.push_back(std::move(operation)); }
  // Whether a batch can be decided now; `unlimited`: however many are outstanding.
  bool has_batch(bool unlimited) const {
    return !ready_.empty() && (unlimited || outstanding_ < options_.max_outstanding);
  }
  // The first operation of the next batch, if there is one.
  const ReadyOperation& front() const { return ready_.front(); }
  // Decides the next batch. `names`: what the ranks know after all earlier decisions that were
  // applied.
  Batch take_batch(const NameTable& names);
  // Decides the batch that ends a join. `rank`: the last rank to join.
  DecisionItem take_join(int rank);
  // A batch of this queue is done on this rank.
  void batch_done() { --outstanding_; }
  // The next batch follows batch `number`: a plan has numbered batches meanwhile.
  void continue_after(std::uint64_t number) { last_batch_ = number; }
  // Forgets the operations that are ready.
  void clear() { ready_.clear(); }

 private:
  std::optional<std::uint32_t> new_id(const ReadyOperation& operation);
  DecisionItem::Member member_of(const ReadyOperation& operation, const NameTable& names);
  std::uint64_t next_number() {
    ++outstanding_;
    return ++last_batch_;
  }

  const Options options_;
  std::vector<DecisionItem> errors_, ends_;
  std::deque<ReadyOperation> ready_;
  int outstanding_ = 0;
  std::uint64_t last_batch_ = 0;
  std::uint32_t next_id_ = 0;
  std::unordered_set<std::string> seen_once_;
};

}  // namespace horoplug
