#include "engine/tracing.h"

#include <algorithm>
#include <utility>

#include "base/time.h"

namespace horoplug {
namespace {

// Names that have a row of their own.
constexpr std::size_t kMaxRows = 1 << 14;

// The key of a row, which is also its title.
std::string title(std::uint32_t set, const std::string& name) {
  return set == 0 ? name : name + " (process set " + std::to_string(set) + ")";
}

TraceEvent instant(TraceRow row, const char* name, SteadyTime at) {
  TraceEvent event;
  event.row = row;
  event.name = name;
  event.begin = at;
  return event;
}

// On a shared row, the span begins after the previous one.
TraceEvent negotiation(TraceRow row, SteadyTime since, const Operation& operation) {
  TraceEvent event =
      instant(row, op_kind_name(operation.signature().op), std::max(since, operation.submitted_at));
  event.kind = TraceEvent::Kind::kSpan;
  event.prefix = "negotiate";
  event.end = steady_now();
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
  const std::lock_guard only_one(changing_);
  // The new one begins after the old one is complete: they may be the same file.
  if (const auto old = replace(nullptr)) old->close();
  timeline->begin();
  replace(std::move(timeline));
}

void Tracing::stop() {
  const std::lock_guard only_one(changing_);
  if (const auto old = replace(nullptr)) old->close();
}

std::shared_ptr<Timeline> Tracing::replace(std::shared_ptr<Timeline> timeline) {
  const std::lock_guard lock(mutex_);
  ++changes_;
  return std::exchange(current_, std::move(timeline));
}

void Tracing::take_over() {
  const std::lock_guard lock(mutex_);
  changes_seen_ = changes_.load();
  timeline_ = current_;
  batch_rows_.clear();
  rows_.clear();
  leased_rows_.clear();
  spare_rows_.clear();
  undecided_.clear();
  if (timeline_ && timeline_->mark_cycles()) cycle_row_ = timeline_->add_row("cycles", -2);
}

Tracing::RowLease Tracing::row_of(std::uint32_t set, const std::string& name) {
  const std::string made = set == 0 ? std::string() : title(set, name);
  const std::string& key = set == 0 ? name : made;
  if (const auto found = rows_.find(key); found != rows_.end()) return {found->second, {}, {}};
  if (rows_.size() < kMaxRows) return {rows_[key] = timeline_->add_row(key), {}, {}};
  auto [leased, is_new] = leased_rows_.emplace(key, RowLease{});
  if (is_new) {
    if (spare_rows_.empty()) spare_rows_.push_back(timeline_->add_row("further tensors"));
    leased->second = {spare_rows_.back(), steady_now(), {"tensor", key}};
    spare_rows_.pop_back();
  }
  return leased->second;
}

void Tracing::give_back_row(std::uint32_t set, const std::string& name) {
  if (leased_rows_.empty()) return;
  const auto leased = leased_rows_.find(title(set, name));
  if (leased == leased_rows_.end()) return;
  spare_rows_.push_back(leased->second.row);
  leased_rows_.erase(leased);
}

TraceRow Tracing::batch_row(std::uint32_t set) {
  const auto [row, is_new] = batch_rows_.emplace(set, 0);
  if (is_new) row->second = timeline_->add_row(title(set, "batches"), -1);
  return row->second;
}

void Tracing::write_cycle(const ProcessSet& set) {
  if (!timeline_->mark_cycles()) return;
  TraceEvent event = instant(cycle_row_, "cycle_start", steady_now());
  event.numbers[0] = {"process_set", set.number()};
  timeline_->add(std::move(event));
}

void Tracing::write_submitted(const Operation& operation) {
  RowLease lease = row_of(operation.members->set, operation.name());
  TraceEvent event = instant(lease.row, "submitted", operation.submitted_at);
  event.text = std::move(lease.tensor);
  event.numbers[0] = {"bytes", operation.identity->bytes};
  timeline_->add(std::move(event));
  undecided_.insert(&operation);
}

void Tracing::write_ready(const ProcessSet& set, int child, const Ready& ready) {
  const TreePosition& position = set.negotiator().position();
  const auto found = std::find(position.children.begin(), position.children.end(), child);
  if (!set.negotiator().is_root() || found == position.children.end()) return;
  const std::string who = describe_ranks(
      position.subtrees[static_cast<std::size_t>(found - position.children.begin())]);
  const SteadyTime now = steady_now();
  const auto write = [&](const std::string& name) {
    TraceEvent event = instant(row_of(set.number(), name).row, "ready", now);
    event.text = {"ready", who};
    timeline_->add(std::move(event));
  };
  for (const std::uint32_t id : ready.ids) {
    if (const std::string* name = set.negotiator().name_of(id)) write(*name);
  }
  for (const Request& request : ready.requests) write(request.name);
}

void Tracing::attach(const ProcessSet& set, Batch& batch) {
  BatchTrace::Batch traced;
  traced.operation = op_kind_name(batch.operations.front()->signature().op);
  traced.plan = batch.plan;
  traced.number = static_cast<std::int64_t>(batch.number);
  traced.bytes = 0;
  traced.row = batch_row(set.number());
  for (const OperationPtr& operation : batch.operations) {
    RowLease lease = row_of(set.number(), operation->name());
    TraceEvent event = negotiation(lease.row, lease.since, *operation);
    event.numbers[0] = {"plan", traced.plan};
    event.numbers[1] = {"batch", traced.number};
    event.text = lease.tensor;
    timeline_->add(std::move(event));
    undecided_.erase(operation.get());
    traced.bytes += operation->identity->bytes;
    traced.members.push_back({lease.row, operation->tensors.size(), std::move(lease.tensor)});
  }
  batch.trace = std::make_unique<BatchTrace>(timeline_, std::move(traced));
}

void Tracing::write_end(std::span<const OperationPtr> operations, const Status& status) {
  for (const OperationPtr& operation : operations) {
    const bool undecided = undecided_.erase(operation.get()) != 0;
    if (!status.ok()) {
      const RowLease lease = row_of(operation->members->set, operation->name());
      if (undecided) timeline_->add(negotiation(lease.row, lease.since, *operation));
      TraceEvent error = instant(lease.row, "error", steady_now());
      error.text = {"error", status.message};
      timeline_->add(std::move(error));
    }
    give_back_row(operation->members->set, operation->name());
  }
}

}  // namespace horoplug
