#include "eager_calls.h"

#include <chrono>

namespace horoplug::jax {

hp_tensor_result CompletedOperation::result(std::size_t index) const {
  hp_tensor_result result{};
  result.struct_size = sizeof result;
  check(hp_result(engine(), handle_, static_cast<std::int32_t>(index), &result));
  return result;
}

EagerCalls::Record& EagerCalls::at(std::int32_t number) {
  const auto found = records_.find(number);
  if (found == records_.end()) {
    throw Failure(xla::kInternal, "there is no eager call " + std::to_string(number));
  }
  return found->second;
}

void EagerCalls::open(std::int32_t number, Request request) {
  std::lock_guard lock(mutex_);
  records_[number].request = std::move(request);
}

bool EagerCalls::await(std::int32_t number, int handlers, double seconds) {
  std::unique_lock lock(mutex_);
  const Record& record = at(number);
  return ended_.wait_for(lock, std::chrono::duration<double>(seconds),
                         [&] { return record.ended >= handlers; });
}

hp_status EagerCalls::failure(std::int32_t number, const char** reason) {
  std::lock_guard lock(mutex_);
  const Record& record = at(number);
  *reason = record.reason.c_str();
  return record.status;
}

const std::vector<std::int64_t>& EagerCalls::row_counts(std::int32_t number, std::size_t tensor) {
  std::lock_guard lock(mutex_);
  return at(number).row_counts.at(tensor);
}

bool EagerCalls::close(std::int32_t number, int handlers) {
  std::lock_guard lock(mutex_);
  Record& record = at(number);
  if (record.ended < handlers) {
    record.remove_after = handlers;
    return false;
  }
  records_.erase(number);
  return true;
}

EagerCalls::Request EagerCalls::request(std::int32_t number) {
  std::lock_guard lock(mutex_);
  return at(number).request;
}

void EagerCalls::keep(std::int32_t number, CompletedOperation operation,
                      std::vector<std::vector<std::int64_t>> row_counts) {
  std::lock_guard lock(mutex_);
  Record& record = at(number);
  record.kept = std::move(operation);
  record.row_counts = std::move(row_counts);
}

CompletedOperation EagerCalls::take(std::int32_t number) {
  std::lock_guard lock(mutex_);
  Record& record = at(number);
  if (record.kept.handle() == 0) throw Failure(xla::kInternal, "the eager call has no results");
  return std::move(record.kept);
}

void EagerCalls::end(std::int32_t number, const Failure* failure) {
  std::lock_guard lock(mutex_);
  Record& record = at(number);
  if (failure != nullptr && record.status == HP_OK) {
    record.status = failure->status();
    record.reason = failure->reason();
  }
  ++record.ended;
  if (record.remove_after >= 0 && record.ended >= record.remove_after) records_.erase(number);
  ended_.notify_all();
}

EagerCalls& eager_calls() {
  static auto* const only = new EagerCalls;
  return *only;
}

}  // namespace horoplug::jax
