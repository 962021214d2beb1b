// The engine that the operations of a framework use. Python sets it when an engine has started, and
// clears it before the engine is destroyed.
//
// Operations lease the engine. Clearing the slot waits until all leases have been returned, after
// which the engine may be destroyed.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <utility>

#include "horoplug/horoplug.h"
#include "prepared_operations.h"

namespace horoplug::bindings {

struct EngineInfo {
  hp_engine* engine = nullptr;
  std::int32_t rank = 0;
  std::int32_t local_rank = 0;
  std::int32_t local_size = 0;
};

class EngineSlot {
 public:
  // Sets the engine. A null engine clears the slot and waits until all leases have been returned.
  void set(const EngineInfo& info);

  // The right to use the engine until the lease is returned.
  class Lease {
   public:
    Lease() = default;
    Lease(EngineSlot* slot, const EngineInfo& info) : slot_(slot), info_(info) {}
    ~Lease() { release(); }
    Lease(Lease&& other) noexcept
        : slot_(std::exchange(other.slot_, nullptr)), info_(other.info_) {}
    Lease& operator=(Lease&& other) noexcept {
      std::swap(slot_, other.slot_);
      std::swap(info_, other.info_);
      return *this;
    }

    explicit operator bool() const { return slot_ != nullptr; }
    const EngineInfo* operator->() const { return &info_; }
    void release();

   private:
    EngineSlot* slot_ = nullptr;
    EngineInfo info_;
  };
  // Empty if no engine is set.
  Lease lease();
  // The operations of this engine; to be used under a lease.
  PreparedOperations& prepared() { return prepared_; }

 private:
  std::mutex mutex_;
  std::condition_variable released_;
  EngineInfo info_;
  int leases_ = 0;
  PreparedOperations prepared_;
};

// The slot of this process. A forked child has a new, empty one.
EngineSlot& engine_slot();

}  // namespace horoplug::bindings
