#include "controller/negotiator.h"

#include <algorithm>
#include <stdexcept>

namespace horoplug {

Negotiator::Negotiator(std::uint32_t set, TreePosition position, Options options)
    : set_(set),
      position_(std::move(position)),
      options_(std::move(options)),
      tuner_(options_.tuner, options_.tuning, options_.job),
      steps_wanted_(options_.plan_after) {}

void Negotiator::submit(const std::string& name, const Signature& signature,
                        std::uint64_t dependency_epoch) {
  if (!pending_.emplace(name, Pending{signature, dependency_epoch, ++submissions_}).second) {
    throw std::logic_error("submitted twice: " + name);
  }
  if (!plan_) {
    enter(name, signature);
  } else if (!plan_->ready(name, signature)) {
    break_plan();
  }
}

void Negotiator::enter(const std::string& name, const Signature& signature) {
  Entry& entry = entries_[name];
  entry.self_in = true;
  group_of(entry, signature).self = true;
  complete_if_full(name);
}

void Negotiator::join() {
  if (!plan_) {
    note_join(position_.rank);
    return;
  }
  join_later_ = true;
  break_plan();
}

void Negotiator::leave() { request_end(position_.rank); }

void Negotiator::close() { request_end(kSetRemoved); }

void Negotiator::request_end(int rank) {
  if (closed()) return;
  if (!is_root()) {
    outgoing_.push_back({position_.parent, encode_leave(set_, rank)});
    return;
  }
  DecisionItem item;
  item.kind = DecisionItem::Kind::kClose;
  item.rank = rank;
  urgent_.push_back(std::move(item));
  break_plan();
}

void Negotiator::note_join(int rank) {
  if (closed()) return;
  if (!joined_.insert(rank).second) throw std::logic_error("joined twice");
  std::vector<std::string> full;
  for (const auto& [name, entry] : entries_) {
    if (is_full(entry)) full.push_back(name);
  }
  // All ranks must see the same order.
  std::sort(full.begin(), full.end());
  for (const std::string& name : full) complete_if_full(name);
  if (is_root()) {
    last_joined_ = rank;
  } else {
    // Report readiness before the join: after the join the parent expects nothing more from this
    // rank.
    flush();
    outgoing_.push_back({position_.parent, encode_join(set_, epoch_, rank)});
  }
}

void Negotiator::fail_all(const Status& status) {
  if (!plan_) flush();  // earlier errors and closings are published first, and so may be a plan
  if (plan_) {
    failure_later_ = status;
    break_plan();
    return;
  }
  DecisionItem item;
  item.kind = DecisionItem::Kind::kFailAll;
  item.code = status.code;
  item.text = status.message;
  publish({item});
}

void Negotiator::batch_done(std::uint32_t plan, double now) {
  if (plan == 0) {
    if (is_root()) --outstanding_;
  } else if (plan_ && plan_->epoch() == plan) {
    for (const std::string& name : plan_->last()) pending_.erase(name);
    plan_->batch_done();
    if (is_root() && plan_->at_step_end()) {
      tuner_.step_done(plan_->last_choice(), now);
      if (tuner_.trial_over()) break_plan();
    }
  }
}

std::size_t Negotiator::child_index(int from) const {
  const auto found = std::find(position_.children.begin(), position_.children.end(), from);
  if (found == position_.children.end()) throw WireError("the sender is not a child of this rank");
  return static_cast<std::size_t>(found - position_.children.begin());
}

bool Negotiator::receive(int from, MessageKind kind, Reader& reader) {
  switch (kind) {
    case MessageKind::kReady:
      receive(from, decode_ready(reader));
      return true;
    case MessageKind::kDecisions:
      receive(from, decode_decisions(reader));
      return true;
    case MessageKind::kLeave:
      receive_leave(from, decode_leave(reader));
      return true;
    case MessageKind::kJoin:
      receive_join(from, decode_join(reader));
      return true;
    case MessageKind::kDependencyLabels:
      receive(from, decode_dependency_labels(reader));
      return true;
    case MessageKind::kBreak:
    case MessageKind::kHalt:
    case MessageKind::kHalted:
      receive(from, kind, decode_plan_notice(reader));
      return true;
    default:
      return false;
  }
}

void Negotiator::receive(int from, const Ready& ready) {
  const std::size_t child = child_index(from);
  if (ready.epoch > epoch_) throw WireError("message of a future epoch");
  // It refers to operations that have failed meanwhile.
  if (ready.epoch < epoch_ || closed()) return;
  for (const std::uint32_t id : ready.ids) {
    const NameTable::Entry* known = table_.at(id);
    if (known == nullptr) throw WireError("unknown name id");
    add_child(known->name, child, known->signature);
  }
  for (const Request& request : ready.requests) {
    if (request.variants.size() == 1 && request.variants.front().ranks.empty()) {
      add_child(request.name, child, request.variants.front().signature);
      continue;
    }
    Entry& entry = entry_for_child(request.name, child);
    for (const Variant& variant : request.variants) {
      VariantGroup& group = group_of(entry, variant.signature);
      group.ranks.insert(group.ranks.end(), variant.ranks.begin(), variant.ranks.end());
    }
    complete_if_full(request.name);
  }
}

bool Negotiator::everyone_joined(const std::vector<int>& ranks) const {
  return std::all_of(ranks.begin(), ranks.end(), [this](int r) { return joined_.contains(r); });
}

Negotiator::Entry& Negotiator::entry_for_child(const std::string& name, std::size_t child) {
  Entry& entry = entries_[name];
  if (std::find(entry.children_in.begin(), entry.children_in.end(), child) !=
      entry.children_in.end()) {
    throw WireError("it was ready for '" + name + "' already");
  }
  entry.children_in.push_back(child);
  return entry;
}

void Negotiator::add_child(const std::string& name, std::size_t child, const Signature& signature) {
  Entry& entry = entry_for_child(name, child);
  group_of(entry, signature).children.push_back(child);
  complete_if_full(name);
}

Negotiator::VariantGroup& Negotiator::group_of(Entry& entry, const Signature& signature) {
  for (VariantGroup& group : entry.groups) {
    if (compatible(group.signature, signature)) return group;
  }
  entry.groups.push_back({signature, false, {}, {}});
  return entry.groups.back();
}

// Whether every rank of the subtree has submitted the operation or has joined.
bool Negotiator::is_full(const Entry& entry) const {
  if (!entry.self_in && !joined_.contains(position_.rank)) return false;
  if (entry.children_in.size() == position_.children.size()) return true;
  if (joined_.empty()) return false;
  for (std::size_t child = 0; child < position_.children.size(); ++child) {
    const auto& in = entry.children_in;
    if (std::find(in.begin(), in.end(), child) == in.end() &&
        !everyone_joined(position_.subtrees[child])) {
      return false;
    }
  }
  return true;
}

void Negotiator::complete_if_full(const std::string& name) {
  const auto found = entries_.find(name);
  Entry& entry = found->second;
  if (!is_full(entry)) return;
  const Entry whole = std::move(entry);
  entries_.erase(found);
  if (is_root()) {
    decide(name, whole);
  } else {
    pass_up(name, whole);
  }
}

std::vector<Variant> Negotiator::variants_of(const Entry& entry) const {
  std::vector<Variant> variants;
  for (const VariantGroup& group : entry.groups) {
    Variant variant{group.signature, group.ranks};
    if (group.self) variant.ranks.push_back(position_.rank);
    for (const std::size_t child : group.children) {
      const auto& below = position_.subtrees[child];
      variant.ranks.insert(variant.ranks.end(), below.begin(), below.end());
    }
    std::sort(variant.ranks.begin(), variant.ranks.end());
    variants.push_back(std::move(variant));
  }
  // Messages list ranks in ascending order.
  std::sort(variants.begin(), variants.end(),
            [](const Variant& a, const Variant& b) { return a.ranks < b.ranks; });
  return variants;
}

void Negotiator::pass_up(const std::string& name, const Entry& entry) {
  // Name the ranks unless the whole subtree agrees. A child names its ranks when others below it
  // have joined, which this rank may learn a moment later.
  if (entry.groups.size() > 1 || !joined_.empty() || !entry.groups.front().ranks.empty()) {
    up_.requests.push_back({name, variants_of(entry)});
    return;
  }
  const Signature& signature = entry.groups.front().signature;
  const auto id = table_.find(name);
  if (id && compatible(table_.at(*id)->signature, signature)) {
    up_.ids.push_back(*id);
  } else {
    up_.requests.push_back({name, {{signature, {}}}});
  }
}

void Negotiator::decide(const std::string& name, const Entry& entry) {
  if (entry.groups.size() > 1) {
    refuse(name, describe_mismatch(name, variants_of(entry)));
    return;
  }
  ReadyOperation operation{name, entry.groups.front().signature, {}};
  // See pass_up().
  if (!joined_.empty() || !entry.groups.front().ranks.empty()) {
    operation.absent = absent_from(variants_of(entry).front().ranks);
  }
  const std::string objection = objection_to(operation.signature, operation.absent);
  if (objection.empty()) {
    ready_.push_back(std::move(operation));
  } else {
    refuse(name, "'" + name + "' cannot run: " + objection);
  }
}

std::vector<int> Negotiator::absent_from(const std::vector<int>& submitted) const {
  std::vector<int> all{position_.rank};
  for (const auto& below : position_.subtrees) all.insert(all.end(), below.begin(), below.end());
  std::sort(all.begin(), all.end());
  std::vector<int> absent;
  std::set_difference(all.begin(), all.end(), submitted.begin(), submitted.end(),
                      std::back_inserter(absent));
  return absent;
}

// The reason why ranks that have joined cannot be left out of this operation; empty if they can.
std::string Negotiator::objection_to(const Signature& signature,
                                     const std::vector<int>& absent) const {
  if (absent.empty()) return {};
  const std::string joined = describe_ranks(absent) + (absent.size() == 1 ? " has" : " have") +
                             " joined and " + (absent.size() == 1 ? "takes" : "take") +
                             " part in nothing of the kind any more";
  if (is_administrative(signature.op)) return joined;
  const bool is_lost = operation_info(signature.op).has_root &&
                       std::find(absent.begin(), absent.end(), signature.root) != absent.end();
  return is_lost ? "its root, rank " + std::to_string(signature.root) + ", has joined" : "";
}

void Negotiator::refuse(const std::string& name, const std::string& text) {
  DecisionItem item;
  item.kind = DecisionItem::Kind::kError;
  item.name = name;
  item.code = HP_MISMATCH;
  item.text = text;
  urgent_.push_back(std::move(item));
}

DecisionItem Negotiator::make_batch(const std::vector<ReadyOperation>& batch) {
  DecisionItem item;
  item.kind = DecisionItem::Kind::kBatch;
  item.batch = ++batches_decided_;
  for (const ReadyOperation& operation : batch) {
    DecisionItem::Member member;
    member.id = table_.find(operation.name);
    if (member.id) {
      if (!compatible(table_.at(*member.id)->signature, operation.signature)) {
        member.name = operation.name;
      }
    } else {
      member.name = operation.name;
      // The first half of the ids is assigned at first sight, the rest only to names that recur.
      const bool room = next_id_ < options_.cache_capacity;
      const bool worth =
          next_id_ < options_.cache_capacity / 2 || seen_once_.contains(operation.name);
      if (operation.signature.recurring && room) {
        if (worth) {
          member.id = next_id_++;
          seen_once_.erase(operation.name);
        } else {
          if (seen_once_.size() >= options_.cache_capacity) seen_once_.clear();
          seen_once_.insert(operation.name);
        }
      }
    }
    if (!operation.absent.empty()) {
      member.absent = operation.absent;
      member.signature = operation.signature;
    }
    item.members.push_back(std::move(member));
  }
  note_decided(batch);
  return item;
}

void Negotiator::flush() {
  if (plan_) {
    join_plan();
    return;
  }
  if (!is_root()) {
    if (!up_.ids.empty() || !up_.requests.empty()) {
      std::sort(up_.ids.begin(), up_.ids.end());
      up_.epoch = epoch_;
      outgoing_.push_back({position_.parent, encode(set_, up_)});
      up_.ids.clear();
      up_.requests.clear();
    }
    return;
  }
  std::vector<DecisionItem> items = std::exchange(urgent_, {});
  // Operations that are ready when the set closes still run, so the end comes last.
  const auto end = std::stable_partition(items.begin(), items.end(), [](const DecisionItem& item) {
    return item.kind != DecisionItem::Kind::kClose;
  });
  const std::vector<DecisionItem> closing(end, items.end());
  items.erase(end, items.end());
  // The same holds for the end of a join: every rank waits for it, so nothing follows.
  const bool all_joined = joined_.size() == position_.size();
  const bool run_all = all_joined || !closing.empty();
  while (!ready_.empty() && (outstanding_ < options_.max_outstanding || run_all)) {
    items.push_back(
        make_batch(plan_batch(ready_, options_.fusion_threshold, options_.fuse_groups)));
    ++outstanding_;
    if (run_all) continue;
    if (auto next = consider_plan()) {
      items.push_back(std::move(*next));
      if (items.back().kind == DecisionItem::Kind::kInstallPlan) break;
    }
  }
  if (all_joined) {
    DecisionItem item;
    item.kind = DecisionItem::Kind::kJoined;
    item.batch = ++batches_decided_;
    item.rank = last_joined_;
    items.push_back(std::move(item));
    ++outstanding_;
  }
  items.insert(items.end(), closing.begin(), closing.end());
  if (!items.empty()) publish(items);
}

void Negotiator::publish(const std::vector<DecisionItem>& items) {
  const Decisions decisions{epoch_, items};
  for (const int child : position_.children) outgoing_.push_back({child, encode(set_, decisions)});
  for (const DecisionItem& item : items) apply(item);
}

void Negotiator::receive(int from, const Decisions& decisions) {
  if (from != position_.parent) throw WireError("the sender is not the parent of this rank");
  if (decisions.epoch != epoch_) throw WireError("decisions of a different epoch");
  for (const int child : position_.children) outgoing_.push_back({child, encode(set_, decisions)});
  for (const DecisionItem& item : decisions.items) apply(item);
}

void Negotiator::receive_leave(int from, int rank) {
  child_index(from);
  request_end(rank);
}

void Negotiator::receive_join(int from, const Joined& joined) {
  const auto& below = position_.subtrees[child_index(from)];
  if (joined.epoch > epoch_) throw WireError("message of a future epoch");
  if (joined.epoch < epoch_ || closed()) return;
  if (std::find(below.begin(), below.end(), joined.rank) == below.end()) {
    throw WireError("join of a rank outside the sender's subtree");
  }
  if (joined_.contains(joined.rank)) throw WireError("second join of the same rank");
  note_join(joined.rank);
}

void Negotiator::forget_everything() {
  pending_.clear();
  entries_.clear();
  ready_.clear();
  joined_.clear();
  up_ = {};
  dependency_query_ = {};
  history_.clear();
  step_pattern_.disturb();
}

void Negotiator::apply(const DecisionItem& item) {
  if (closed()) return;
  const bool of_plan = item.kind == DecisionItem::Kind::kUninstallPlan;
  if (of_plan != has_plan()) throw WireError("decision that does not match the plan state");
  Decision decision;
  decision.kind = item.kind;
  switch (item.kind) {
    case DecisionItem::Kind::kDependencyQuery:
      join_dependency_query(item);
      return;
    case DecisionItem::Kind::kInstallPlan:
      install_plan(item);
      return;
    case DecisionItem::Kind::kUninstallPlan:
      uninstall_plan(item);
      return;
    case DecisionItem::Kind::kBatch:
      if (item.batch != last_batch_ + 1) throw WireError("batch number out of order");
      last_batch_ = decision.batch = item.batch;
      decision.tuning = options_.tuning;
      for (const auto& member : item.members) {
        const NameTable::Entry* known = member.id ? table_.at(*member.id) : nullptr;
        const std::string name = member.name.empty() && known ? known->name : member.name;
        const auto pending = pending_.find(name);
        const bool is_absent = std::find(member.absent.begin(), member.absent.end(),
                                         position_.rank) != member.absent.end();
        if (is_absent != (pending == pending_.end()) || name.empty()) {
          throw WireError("batch with an operation that is not ready on this rank");
        }
        const Signature signature = is_absent ? member.signature : pending->second.signature;
        if (member.id && !member.name.empty() && !table_.set(*member.id, name, signature)) {
          throw WireError("name id out of order");
        }
        if (is_absent) {
          decision.unknown.emplace(name, signature);
          remember(name, signature, kNoDependencyEpoch);
        } else {
          remember(name, signature,
                   member.absent.empty() ? pending->second.dependency_epoch : kNoDependencyEpoch);
          pending_.erase(pending);
        }
        decision.names.push_back(name);
        decision.absent.push_back(member.absent);
      }
      break;
    case DecisionItem::Kind::kJoined:
      if (item.batch != last_batch_ + 1) throw WireError("batch number out of order");
      if (!joined_.contains(position_.rank))
        throw WireError("end of a join that this rank has not entered");
      last_batch_ = decision.batch = item.batch;
      decision.rank = item.rank;
      joined_.clear();
      break;
    case DecisionItem::Kind::kError:
      if (pending_.erase(item.name) > 0) {
        decision.names.push_back(item.name);
      } else if (!joined_.contains(position_.rank)) {
        throw WireError("error for an operation that is not ready on this rank");
      }
      decision.status = {item.code, item.text};
      break;
    case DecisionItem::Kind::kFailAll:
      ++epoch_;
      forget_everything();
      decision.status = {item.code, item.text};
      break;
    case DecisionItem::Kind::kClose:
      forget_everything();
      end_ = decision.status = {
          HP_SHUT_DOWN,
          item.rank == kSetRemoved
              ? "process set " + std::to_string(set_) + " was removed"
              : "rank " + std::to_string(item.rank) +
                    " has shut down or its program has ended; no operation can run any more until "
                    "every rank calls init() again"};
      break;
  }
  decisions_.push_back(std::move(decision));
}

}  // namespace horoplug
