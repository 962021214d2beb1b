#include "prepared.h"

#include "engine.h"

namespace horoplug::python {

hp_status PreparedOnEngines::on(const Engine& engine, const hp_submission& submission,
                                const hp_prepared** prepared) {
  const Entry* entry = last_.load(std::memory_order_acquire);
  if (entry == nullptr || entry->engine != engine.number()) {
    hp_prepared* made = nullptr;
    const hp_status status = hp_prepare(engine.get(), &submission, &made);
    if (status != HP_OK) return status;
    const std::lock_guard lock(mutex_);
    entries_.push_back(
        std::unique_ptr<const Entry>(new Entry{engine.number(), {made, hp_prepared_free}}));
    entry = entries_.back().get();
    last_.store(entry, std::memory_order_release);
  }
  *prepared = entry->prepared.get();
  return HP_OK;
}

}  // namespace horoplug::python
