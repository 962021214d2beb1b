#include "engine_slot.h"

#include "per_process.h"

namespace horoplug::bindings {

void EngineSlot::set(const EngineInfo& info) {
  std::unique_lock lock(mutex_);
  info_ = info;
  if (info.engine == nullptr) released_.wait(lock, [this] { return leases_ == 0; });
  prepared_.clear();
}

EngineSlot::Lease EngineSlot::lease() {
  std::lock_guard lock(mutex_);
  if (info_.engine == nullptr) return {};
  ++leases_;
  return {this, info_};
}

void EngineSlot::Lease::release() {
  if (slot_ == nullptr) return;
  EngineSlot& slot = *std::exchange(slot_, nullptr);
  std::lock_guard lock(slot.mutex_);
  if (--slot.leases_ == 0) slot.released_.notify_all();
}

EngineSlot& engine_slot() { return per_process<EngineSlot>(); }

}  // namespace horoplug::bindings
