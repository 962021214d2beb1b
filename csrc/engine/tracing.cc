#include "engine/tracing.h"

#include <algorithm>
#include <utility>

#include "trace/clock.h"

namespace horoplug {
namespace {

// Names that have a row of their own.
constexpr std::size_t kMaxRows = 1 << 14;

// What a row is found by and called.
std::string title(std::uint32_t set, const std::string& name) {
  return set == 0 ? name : name + " (process set " + std::to_string(set) + ")";
}

TraceEvent instant(TraceRow row, const char* name, double at) {
  TraceEvent event;
  event.row = row;
  event.name = name;
  event.begin = at;
  return event;
}

TraceEvent negotiation(TraceRow row, const Operation& operation) {
  TraceEvent event = instant(row, op_kind_name(operation.signature.op), operation.submitted_at);
  event.kind = TraceEvent::Kind::kSpan;
  event.prefix = "negotiate";
  event.end = trace_clock();
  return event;
}

}  // namespace

void Tracing::start(const std::string& path, bool mark_cycles) {
  if (path.empty()) throw Error(HP_INVALID_ARGUMENT, "the timeline needs the path of a file");
  if (!writes_) return;
  Timeline::Options options;
  options.mark_cycles = mark_cycles;
  auto timeline = std::make_shared<Timeline>(
      path, options, [log = log_](const std::string& text) { log(LogLevel::kWarning, text); });
  const std::lock_guard lock(mutex_);
  // The new one begins after the old one is complete: they may be the same file.
  if (current_) current_->close();
  current_.reset();
  ++changes_;
  timeline->begin();
  current_ = std::move(timeline);
  ++changes_;
}

void Tracing::stop() {
  const std::lock_guard lock(mutex_);
  if (!current_) return;
  current_->close();
  current_.reset();
  ++changes_;
}

void Tracing::take_over() {
  const std::lock_guard lock(mutex_);
  changes_seen_ = changes_.load();
  timeline_ = current_;
  batch_rows_.clear();
  rows_.clear();
  lent_rows_.clear();
  spare_rows_.clear();
  undecided_.clear();
  if (timeline_ && timeline_->mark_cycles()) cycle_row_ = timeline_->add_row("cycles", -2);
}

TraceRow Tracing::row_of(std::uint32_t set, const std::string& name, TraceEvent::Text& tensor) {
  const std::string made = set == 0 ? std::string() : title(set, name);
  const std::string& key = set == 0 ? name : made;
  if (const auto found = rows_.find(key); found != rows_.end()) return found->second;
  if (rows_.size() < kMaxRows) return rows_[key] = timeline_->add_row(key);
  tensor = {"tensor", key};
  auto [lent, is_new] = lent_rows_.emplace(key, 0);
  if (!is_new) return lent->second;
  if (spare_rows_.empty()) spare_rows_.push_back(timeline_->add_row("further tensors"));
  lent->second = spare_rows_.back();
  spare_rows_.pop_back();
  return lent->second;
}

void Tracing::give_back_row(std::uint32_t set, const std::string& name) {
  if (lent_rows_.empty()) return;
  const auto lent = lent_rows_.find(title(set, name));
  if (lent == lent_rows_.end()) return;
  spare_rows_.push_back(lent->second);
  lent_rows_.erase(lent);
}

TraceRow Tracing::batch_row(std::uint32_t set) {
  const auto [row, is_new] = batch_rows_.emplace(set, 0);
  if (is_new) row->second = timeline_->add_row(title(set, "batches"), -1);
  return row->second;
}

void Tracing::write_cycle(const ProcessSet& set) {
  if (!timeline_->mark_cycles()) return;
  TraceEvent event = instant(cycle_row_, "cycle_start", trace_clock());
  event.numbers[0] = {"process_set", set.id};
  timeline_->add(std::move(event));
}

void Tracing::write_submitted(const Operation& operation) {
  TraceEvent event = instant(0, "submitted", operation.submitted_at);
  event.row = row_of(operation.set, operation.name, event.text);
  event.numbers[0] = {"bytes", payload_bytes(operation.signature)};
  timeline_->add(std::move(event));
  undecided_.insert(&operation);
}

void Tracing::write_ready(const ProcessSet& set, int child, const Ready& ready) {
  const TreePlace& place = set.negotiator.place();
  const auto found = std::find(place.children.begin(), place.children.end(), child);
  if (!set.negotiator.is_root() || found == place.children.end()) return;
  std::vector<int> ranks;
  for (const int rank : place.subtrees[static_cast<std::size_t>(found - place.children.begin())]) {
    ranks.push_back(set.members[static_cast<std::size_t>(rank)]);
  }
  const std::string who = describe_ranks(std::move(ranks));
  const double now = trace_clock();
  const auto write = [&](const std::string& name) {
    TraceEvent event = instant(0, "ready", now);
    TraceEvent::Text tensor;
    event.row = row_of(set.id, name, tensor);
    event.text = {"ready", who};
    timeline_->add(std::move(event));
  };
  for (const std::uint32_t id : ready.ids) {
    if (const std::string* name = set.negotiator.name_of(id)) write(*name);
  }
  for (const Request& request : ready.requests) write(request.name);
}

void Tracing::attach(const ProcessSet& set, Batch& batch) {
  BatchTrace::Batch traced;
  traced.operation = op_kind_name(batch.operations.front()->signature.op);
  traced.plan = set.negotiator.epoch();
  traced.number = static_cast<std::int64_t>(batch.number);
  traced.bytes = 0;
  traced.row = batch_row(set.id);
  for (const OperationPtr& operation : batch.operations) {
    BatchTrace::Member member;
    member.row = row_of(set.id, operation->name, member.tensor);
    member.tensors = operation->tensors.size();
    traced.bytes += payload_bytes(operation->signature);
    TraceEvent event = negotiation(member.row, *operation);
    event.numbers[0] = {"plan", traced.plan};
    event.numbers[1] = {"batch", traced.number};
    event.text = member.tensor;
    timeline_->add(std::move(event));
    undecided_.erase(operation.get());
    traced.members.push_back(std::move(member));
  }
  batch.trace = std::make_unique<BatchTrace>(timeline_, std::move(traced));
}

void Tracing::write_end(const std::vector<OperationPtr>& operations, const Status& status) {
  for (const OperationPtr& operation : operations) {
    const bool undecided = undecided_.erase(operation.get()) != 0;
    if (!status.ok()) {
      TraceEvent error = instant(0, "error", trace_clock());
      error.row = row_of(operation->set, operation->name, error.text);
      if (undecided) timeline_->add(negotiation(error.row, *operation));
      error.text = {"error", status.message};
      timeline_->add(std::move(error));
    }
    give_back_row(operation->set, operation->name);
  }
}

}  // namespace horoplug
