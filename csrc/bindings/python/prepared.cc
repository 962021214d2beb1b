#include "prepared.h"

#include "engine.h"

namespace horoplug::python {

hp_status Prepared::on(const Engine& engine, std::shared_ptr<hp_prepared>& prepared) {
#ifdef Py_GIL_DISABLED
  const std::lock_guard lock(mutex_);
#endif
  if (engine_ != engine.number()) {
    hp_prepared* made = nullptr;
    const hp_status status = hp_prepare(engine.get(), &submission_.get(), &made);
    if (status != HP_OK) return status;
    prepared_ = std::shared_ptr<hp_prepared>(made, hp_prepared_free);
    engine_ = engine.number();
  }
  prepared = prepared_;
  return HP_OK;
}

}  // namespace horoplug::python
