// The operations that a framework has submitted under names, prepared: kernels and compiled
// programs submit the same ones in each step. Any thread may call these functions.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

#include "horoplug/horoplug.h"

namespace horoplug::bindings {

class PreparedOperations {
 public:
  // hp_submit, and hp_perform without a timeout. After a success of perform(), `handle` may be 0:
  // see hp_start_and_wait.
  hp_status submit(hp_engine* engine, const hp_submission& submission, hp_handle* handle);
  hp_status perform(hp_engine* engine, const hp_submission& submission, hp_handle* handle);
  // Forgets all of them, which are of one engine.
  void clear();

 private:
  struct Entry;
  struct HashOfName {
    using is_transparent = void;
    std::size_t operator()(std::string_view name) const {
      return std::hash<std::string_view>{}(name);
    }
  };
  // nullptr: this operation cannot be prepared.
  std::shared_ptr<const Entry> find(hp_engine* engine, const hp_submission& submission);

  std::mutex mutex_;
  std::unordered_map<std::string, std::shared_ptr<const Entry>, HashOfName, std::equal_to<>> known_;
};

}  // namespace horoplug::bindings
