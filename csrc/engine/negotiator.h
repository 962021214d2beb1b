// Agrees, for one process set, on what runs next and in which order.
//
// Each rank says once for every operation that it is ready. Readiness is gathered along a tree: a
// rank tells its parent as soon as an operation is ready in all of its subtree, so that an
// operation costs each rank one message up and one down, however many ranks there are, and
// operations that become ready together share it. The root compares what the ranks have submitted,
// fuses what fits together, and sends the order down. Names that recur travel as bits.
//
// A rank that has joined has nothing more to submit; an operation is then ready when everyone else
// has submitted it, and the ranks that have joined are told what it is, so that they can take part.
//
// This is a state machine: submissions and messages go in, messages and decisions come out. There
// is no I/O, no clock and no thread in it. Every rank sees the same decisions in the same order.
//
// Locked plans (batches that start without being negotiated) will live beside it: the epoch that
// every message carries is there so that what belongs to an earlier agreement can be told apart and
// dropped.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/status.h"
#include "engine/fusion.h"
#include "engine/messages.h"
#include "engine/name_table.h"
#include "engine/topology.h"

namespace horoplug {

class Negotiator {
 public:
  struct Options {
    std::int64_t fusion_threshold = 128 << 20;
    bool fuse_groups = true;
    std::size_t cache_capacity = 8192;
    // Batches that may be decided but not yet done on the root. Two keep the ranks busy; more would
    // only take tensors away from later, larger batches.
    int max_outstanding = 2;
  };

  struct Outgoing {
    int to;
    Bytes message;
  };

  struct Decision {
    DecisionItem::Kind kind;
    std::uint64_t batch = 0;         // kBatch, kJoined
    std::vector<std::string> names;  // kBatch: members in order; kError: the one that fails
    // kBatch, by place in names: ranks that have joined and take no part of their own. Empty if
    // there are none.
    std::vector<std::vector<int>> absent;
    // kBatch: what the members are that this rank has not submitted, because it has joined.
    std::map<std::string, Signature> unknown;
    int rank = 0;   // kJoined: the last to join
    Status status;  // kError, kFailAll, kClose
  };

  Negotiator(std::uint32_t set, TreePlace place, Options options);

  // This rank is ready to run an operation. Its name must not be pending, and the set not closed.
  void submit(const std::string& name, const Signature& signature);
  // This rank submits nothing more until everyone has joined, which is then decided (kJoined).
  void join();
  // This rank wants to leave: the set is closed for everyone, after what has been decided by then.
  void leave();
  // The same because the set is removed, by all its ranks.
  void close();
  // Root only: every pending operation fails, on all ranks, and the set goes on.
  void fail_all(const Status& status);
  // A batch of this set is done on this rank.
  void batch_done();

  // Messages of this set. They throw WireError if the message cannot be right.
  void receive(int from, const Ready& ready);
  void receive(int from, const Decisions& decisions);
  void receive_leave(int from, int rank);
  void receive_join(int from, const Joined& joined);

  // Turns what has come in since the last call into messages and, on the root, into decisions.
  void flush();

  std::vector<Outgoing> take_outgoing() { return std::exchange(outgoing_, {}); }
  std::vector<Decision> take_decisions() { return std::exchange(decisions_, {}); }

  bool is_root() const { return place_.is_root(); }
  bool closed() const { return !end_.ok(); }
  // Why nothing can be submitted any more, once the set is closed.
  const Status& end() const { return end_; }
  const TreePlace& place() const { return place_; }
  std::size_t cached_names() const { return table_.size(); }
  // What a number stands for; nullptr if it was never given.
  const std::string* name_of(std::uint32_t id) const {
    const NameTable::Entry* known = table_.at(id);
    return known != nullptr ? &known->name : nullptr;
  }
  // Grows whenever everything pending is called off.
  std::uint32_t epoch() const { return epoch_; }

 private:
  // The parts of the subtree that have submitted an operation with equal signatures.
  struct Camp {
    Signature signature;
    bool self = false;
    std::vector<std::size_t> children;  // whole subtrees
    std::vector<int> ranks;             // single ranks, when a subtree is divided
  };
  struct Entry {
    std::vector<Camp> camps;
    std::vector<std::size_t> children_in;
    bool self_in = false;
  };

  std::size_t child_index(int from) const;
  bool everyone_joined(const std::vector<int>& ranks) const;
  bool is_full(const Entry& entry) const;
  void note_join(int rank);
  void request_end(int rank);
  void forget_everything();
  Camp& camp_of(Entry& entry, const Signature& signature);
  void add_child(const std::string& name, std::size_t child, const Signature& signature);
  Entry& entry_for_child(const std::string& name, std::size_t child);
  void complete_if_full(const std::string& name);
  std::vector<Variant> variants_of(const Entry& entry) const;
  void pass_up(const std::string& name, const Entry& entry);
  void decide(const std::string& name, const Entry& entry);
  std::vector<int> absent_from(const std::vector<int>& submitted) const;
  std::string objection_to(const Signature& signature, const std::vector<int>& absent) const;
  void refuse(const std::string& name, const std::string& text);
  DecisionItem make_batch(const std::vector<ReadyOperation>& batch);
  void publish(const std::vector<DecisionItem>& items);
  void apply(const DecisionItem& item);

  const std::uint32_t set_;
  const TreePlace place_;
  const Options options_;
  std::uint32_t epoch_ = 0;
  Status end_;  // not HP_OK: the set is closed

  NameTable table_;
  std::unordered_map<std::string, Signature> pending_;  // submitted here and not decided
  std::unordered_map<std::string, Entry> entries_;      // submitted somewhere in the subtree
  Ready up_;                                            // to be told to the parent
  std::uint64_t last_batch_ = 0;
  std::set<int> joined_;  // ranks of the subtree

  // Root only.
  std::deque<ReadyOperation> ready_;
  std::vector<DecisionItem> urgent_;  // errors and the end, which wait for nothing
  std::unordered_set<std::string> seen_once_;
  std::uint64_t batches_decided_ = 0;
  int outstanding_ = 0;
  int last_joined_ = -1;
  std::uint32_t next_id_ = 0;

  std::vector<Outgoing> outgoing_;
  std::vector<Decision> decisions_;
};

}  // namespace horoplug
