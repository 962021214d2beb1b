#include "engine/on_demand_connections.h"

#include <sys/socket.h>

#include <cstdint>
#include <utility>

namespace horoplug {

void OnDemandConnections::add(int rank, std::vector<std::unique_ptr<Stream>> lanes) {
  push({.rank = rank, .lanes = std::move(lanes), .failure = {}});
}

void OnDemandConnections::fail(int rank, const std::string& reason) {
  push({.rank = rank, .lanes = {}, .failure = reason});
}

void OnDemandConnections::push(Result result) {
  {
    std::lock_guard lock(mutex_);
    results_.push_back(std::move(result));
    waiting_ = true;
  }
  doorbell_.ring();
}

bool OnDemandConnections::run() {
  ask();
  return waiting_ && take();
}

void OnDemandConnections::ask() {
  for (const int rank : mesh_.take_needed()) unasked_.push_back(rank);
  while (!unasked_.empty()) {
    const auto rank = static_cast<std::uint32_t>(unasked_.back());
    // A stream socket takes four bytes as a whole or not at all.
    const auto sent = ::send(requests_.get(), &rank, sizeof rank, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) return;
    unasked_.pop_back();
  }
}

bool OnDemandConnections::take() {
  std::vector<Result> results;
  {
    std::lock_guard lock(mutex_);
    results.swap(results_);
    waiting_ = false;
  }
  for (Result& result : results) {
    if (result.failure.empty()) {
      mesh_.connect(result.rank, std::move(result.lanes));
    } else if (!mesh_.connected(result.rank)) {
      mesh_.link(result.rank)->fail(result.failure);
    }
  }
  return true;
}

}  // namespace horoplug
