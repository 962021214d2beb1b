#include "engine/abi/engine_owner.h"

namespace horoplug::abi {

EngineOwner::EngineOwner(EngineConfig config)
    : shut_down_(has_shut_down(config.options)),
      engine_(std::make_unique<Engine>(std::move(config), handles_)) {
  engine_->wait_until_ready();
}

EngineOwner::Lease EngineOwner::lease() {
  if ((leases_.fetch_add(1) & kDestroyed) == 0) return Lease(this);
  give_back();
  return Lease(nullptr);
}

EngineOwner::Lease EngineOwner::use() {
  Lease lease = this->lease();
  if (!lease) throw Error(shut_down_.code, shut_down_.message);
  return lease;
}

void EngineOwner::give_back() {
  if (leases_.fetch_sub(1) == kDestroyed + 1) leases_.notify_all();
}

hp_stats EngineOwner::stats() {
  if (const Lease lease = this->lease()) return lease->stats();
  std::lock_guard lock(shutdown_);
  return last_stats_;
}

void EngineOwner::shutdown() {
  std::lock_guard lock(shutdown_);
  if (!engine_) return;
  // Ends all operations, and with them the waits of other threads.
  engine_->shutdown();
  for (std::uint32_t held = leases_.fetch_or(kDestroyed) | kDestroyed; held != kDestroyed;
       held = leases_.load()) {
    leases_.wait(held);
  }
  last_stats_ = engine_->stats();
  engine_.reset();
  handles_->release_buffers();
}

}  // namespace horoplug::abi
