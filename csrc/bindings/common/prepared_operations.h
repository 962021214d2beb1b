// The operations that a framework has submitted, prepared: programs submit the same ones in each
// step. Any thread may call these functions.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "horoplug/horoplug.h"
#include "kept_submission.h"

namespace horoplug::bindings {

class PreparedOperations {
 public:
  // hp_submit and hp_perform. After a success of perform(), `handle` may be 0 unless
  // `keeps_handle`: see hp_instance.
  hp_status submit(hp_engine* engine, const hp_submission& submission, hp_handle* handle);
  hp_status perform(hp_engine* engine, const hp_submission& submission, double timeout,
                    bool keeps_handle, hp_handle* handle);
  // Forgets all of them, which are of one engine.
  void clear();

 private:
  struct Entry;
  // nullptr: this operation cannot be prepared.
  std::shared_ptr<const Entry> find(hp_engine* engine, const hp_submission& submission);

  std::mutex mutex_;
  std::unordered_map<std::uint64_t, std::shared_ptr<const Entry>> known_;  // by a hash
};

}  // namespace horoplug::bindings
