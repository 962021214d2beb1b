// The engine behind a handle of the C ABI, which ends before the handles of its operations do.
//
// shutdown() destroys the engine and with it the thread, the connections and the shared memory.
// What remains until this object is destroyed are the operations that have a handle, all of which
// have ended, with their status and results. Any thread may call these functions.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include "engine/engine.h"

namespace horoplug::abi {

class EngineOwner {
 public:
  // Returns when the engine has started; throws Error if it does not.
  explicit EngineOwner(EngineConfig config);
  EngineOwner(const EngineOwner&) = delete;
  EngineOwner& operator=(const EngineOwner&) = delete;

  // The right to use the engine: it is not destroyed meanwhile.
  class Lease {
   public:
    explicit Lease(EngineOwner* owner) : owner_(owner) {}
    Lease(Lease&& other) noexcept : owner_(std::exchange(other.owner_, nullptr)) {}
    Lease& operator=(Lease&&) = delete;
    ~Lease() {
      if (owner_ != nullptr) owner_->give_back();
    }
    explicit operator bool() const { return owner_ != nullptr; }
    Engine* operator->() const { return owner_->engine_.get(); }

   private:
    EngineOwner* owner_;
  };
  // Empty if the engine has been destroyed.
  Lease lease();
  // The same; throws Error(HP_SHUT_DOWN) if the engine has been destroyed.
  Lease use();

  HandleTable& handles() { return *handles_; }
  // The counters now, or when the engine was destroyed.
  hp_stats stats();

  // Leaves the job, waits for the calls of other threads and destroys the engine. Idempotent.
  void shutdown();

 private:
  void give_back();

  static constexpr std::uint32_t kDestroyed = std::uint32_t{1} << 31;

  const std::shared_ptr<HandleTable> handles_ = std::make_shared<HandleTable>();
  const Status shut_down_;  // for calls after the end
  std::unique_ptr<Engine> engine_;
  // The number of leases, and kDestroyed once there are no further ones.
  std::atomic<std::uint32_t> leases_{0};
  std::mutex shutdown_;  // one thread at a time destroys the engine
  hp_stats last_stats_{};
};

}  // namespace horoplug::abi
