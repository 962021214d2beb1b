#include "tickets.h"

#include <chrono>
#include <utility>

namespace horoplug::jax {

hp_tensor_result Ended::result(std::size_t index) const {
  hp_tensor_result result{};
  result.struct_size = sizeof result;
  check(hp_result(engine(), handle_, static_cast<std::int32_t>(index), &result));
  return result;
}

Tickets::Ticket& Tickets::at(std::int32_t number) {
  const auto found = tickets_.find(number);
  if (found == tickets_.end()) {
    throw Failure(xla::kInternal, "there is no ticket " + std::to_string(number));
  }
  return found->second;
}

void Tickets::open(std::int32_t number, Request request) {
  std::lock_guard lock(mutex_);
  tickets_[number].request = std::move(request);
}

bool Tickets::await(std::int32_t number, int handlers, double seconds) {
  std::unique_lock lock(mutex_);
  const Ticket& ticket = at(number);
  return ended_.wait_for(lock, std::chrono::duration<double>(seconds),
                         [&] { return ticket.ended >= handlers; });
}

hp_status Tickets::failure(std::int32_t number, const char** reason) {
  std::lock_guard lock(mutex_);
  const Ticket& ticket = at(number);
  *reason = ticket.reason.c_str();
  return ticket.status;
}

const std::vector<std::int64_t>& Tickets::row_counts(std::int32_t number, std::size_t tensor) {
  std::lock_guard lock(mutex_);
  return at(number).row_counts.at(tensor);
}

bool Tickets::close(std::int32_t number, int handlers) {
  std::lock_guard lock(mutex_);
  Ticket& ticket = at(number);
  if (ticket.ended < handlers) {
    ticket.forget_after = handlers;
    return false;
  }
  tickets_.erase(number);
  return true;
}

Tickets::Request Tickets::request(std::int32_t number) {
  std::lock_guard lock(mutex_);
  return at(number).request;
}

void Tickets::keep(std::int32_t number, Ended operation,
                   std::vector<std::vector<std::int64_t>> row_counts) {
  std::lock_guard lock(mutex_);
  Ticket& ticket = at(number);
  ticket.kept = std::move(operation);
  ticket.row_counts = std::move(row_counts);
}

Ended Tickets::take(std::int32_t number) {
  std::lock_guard lock(mutex_);
  Ticket& ticket = at(number);
  if (ticket.kept.handle() == 0) throw Failure(xla::kInternal, "a ticket without results");
  return std::move(ticket.kept);
}

void Tickets::end(std::int32_t number, const Failure* failure) {
  std::lock_guard lock(mutex_);
  Ticket& ticket = at(number);
  if (failure != nullptr && ticket.status == HP_OK) {
    ticket.status = failure->status();
    ticket.reason = failure->reason();
  }
  ++ticket.ended;
  if (ticket.forget_after >= 0 && ticket.ended >= ticket.forget_after) tickets_.erase(number);
  ended_.notify_all();
}

Tickets& tickets() {
  static auto* const only = new Tickets;
  return *only;
}

}  // namespace horoplug::jax
