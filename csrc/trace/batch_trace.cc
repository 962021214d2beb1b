#include "trace/batch_trace.h"

#include <algorithm>

namespace horoplug {
namespace {

// Copies of the same kind with a shorter gap between them appear as one span. A shorter transfer is
// not shown between copies.
constexpr Seconds kGap{1e-6};

}  // namespace

BatchTrace::BatchTrace(std::shared_ptr<Timeline> timeline, Batch batch)
    : timeline_(std::move(timeline)), batch_(std::move(batch)) {
  std::size_t tensors = 0;
  for (const Member& member : batch_.members) {
    first_tensor_.push_back(tensors);
    tensors += member.tensors;
  }
}

void BatchTrace::start() {
  started_ = steady_now();
  TraceEvent event = span(batch_.row, "batch_started", *started_, {});
  event.kind = TraceEvent::Kind::kInstant;
  event.numbers[2] = {"tensors", static_cast<std::int64_t>(batch_.members.size())};
  timeline_->add(std::move(event));
}

void BatchTrace::begin_transfer(const char* medium, const char* algorithm, std::size_t bytes) {
  transfers_.push_back({medium, algorithm, static_cast<std::int64_t>(bytes), steady_now(), {}});
}

void BatchTrace::add_copy(Copy kind, std::size_t tensor, SteadyTime begin) {
  const SteadyTime now = steady_now();
  if (!copies_.empty()) {
    CopySpan& last = copies_.back();
    if (last.kind == kind && last.tensor == tensor && begin - last.end < kGap) {
      last.end = now;
      return;
    }
  }
  copies_.push_back({kind, tensor, begin, now});
}

std::size_t BatchTrace::member_of(std::size_t tensor) const {
  // An operation that is not fused runs its tensors one by one and counts anew for each.
  if (batch_.members.size() == 1) return 0;
  const auto next = std::upper_bound(first_tensor_.begin(), first_tensor_.end(), tensor);
  return static_cast<std::size_t>(next - first_tensor_.begin()) - 1;
}

TraceEvent BatchTrace::span(TraceRow row, const char* name, SteadyTime begin,
                            SteadyTime end) const {
  TraceEvent event;
  event.kind = TraceEvent::Kind::kSpan;
  event.row = row;
  event.name = name;
  event.begin = begin;
  event.end = end;
  event.numbers[0] = {"plan", batch_.plan};
  event.numbers[1] = {"batch", batch_.number};
  return event;
}

void BatchTrace::end() {
  const SteadyTime now = steady_now();
  const SteadyTime started = started_.value_or(now);
  if (!transfers_.empty() && transfers_.back().end == SteadyTime{}) transfers_.back().end = now;
  if (started_) {
    TraceEvent whole = span(batch_.row, batch_.operation, started, now);
    whole.numbers[2] = {"tensors", static_cast<std::int64_t>(batch_.members.size())};
    whole.numbers[3] = {"bytes", batch_.bytes};
    timeline_->add(std::move(whole));
    write_inside(batch_.row, copies_, false);
  }
  std::vector<std::vector<CopySpan>> copies(batch_.members.size());
  for (const CopySpan& copy : copies_) copies[member_of(copy.tensor)].push_back(copy);
  for (std::size_t i = 0; i < batch_.members.size(); ++i) {
    const Member& member = batch_.members[i];
    timeline_->add(span(member.row, "wait", decided_, started));
    if (!started_) continue;
    TraceEvent running = span(member.row, batch_.operation, started, now);
    running.text = member.tensor;
    timeline_->add(std::move(running));
    write_inside(member.row, copies[i], true);
  }
}

// `one_member`: its transfer lasts from the end of its packing to the beginning of its unpacking,
// however long the others take.
void BatchTrace::write_inside(TraceRow row, std::span<const CopySpan> copies, bool one_member) {
  std::vector<CopySpan> merged;
  for (const CopySpan& copy : copies) {
    if (!merged.empty() && merged.back().kind == copy.kind &&
        copy.begin - merged.back().end < kGap) {
      merged.back().end = copy.end;
    } else {
      merged.push_back(copy);
    }
  }
  for (const CopySpan& copy : merged) {
    const bool in = copy.kind == Copy::kIn;
    timeline_->add(span(row, in ? "memcpy_in_fusion_buffer" : "memcpy_out_fusion_buffer",
                        copy.begin, copy.end));
  }
  for (const Transfer& transfer : transfers_) {
    auto first = std::find_if(merged.begin(), merged.end(),
                              [&](const CopySpan& copy) { return copy.begin >= transfer.begin; });
    const auto last = std::find_if(
        first, merged.end(), [&](const CopySpan& copy) { return copy.begin >= transfer.end; });
    SteadyTime begin = transfer.begin;
    SteadyTime end = transfer.end;
    if (one_member && first != last) {
      if (first->kind == Copy::kIn) begin = first->end;
      if (std::prev(last)->kind == Copy::kOut) end = std::prev(last)->begin;
    }
    bool shown = false;
    SteadyTime from = begin;
    for (; first != last; ++first) {
      if (first->begin - from >= kGap) {
        write_transfer(row, transfer, from, first->begin);
        shown = true;
      }
      from = std::max(from, first->end);
    }
    if (end - from >= kGap) {
      write_transfer(row, transfer, from, end);
    } else if (!shown) {
      write_transfer(row, transfer, begin, std::max(begin, end));
    }
  }
}

void BatchTrace::write_transfer(TraceRow row, const Transfer& transfer, SteadyTime begin,
                                SteadyTime end) {
  TraceEvent event = span(row, batch_.operation, begin, end);
  event.prefix = transfer.medium;
  event.algorithm = transfer.algorithm;
  event.numbers[2] = {"bytes", transfer.bytes};
  timeline_->add(std::move(event));
}

}  // namespace horoplug
