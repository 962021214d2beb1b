// A driver without a GPU: it writes down what is called, hands out handles that stand for nothing
// but their number, and keeps the GPU's memory in the host's.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "device/cuda/driver/driver.h"

namespace horoplug::testing {

class RecordedDriver {
 public:
  // One at a time in a thread: the functions of the table find it by that.
  RecordedDriver();
  ~RecordedDriver();
  RecordedDriver(const RecordedDriver&) = delete;
  RecordedDriver& operator=(const RecordedDriver&) = delete;

  const cuda::DriverApi& api() const { return api_; }

  // Calls that matter to the order of things, in words: "launch copy_32 <<<8>>> stream 2".
  std::vector<std::string> take_calls();
  // Lets all calls of a function fail from now on: fail("cuMemAlloc", 2).
  void fail(const std::string& function, CUresult result) { failures_[function] = result; }
  // Events that have been recorded come to pass, or do not until further notice.
  void set_events_done(bool done) { events_done_ = done; }
  // Handles that were made and not given back.
  std::size_t alive() const { return alive_.size(); }
  // Contexts that are pushed and not popped.
  int pushed() const { return pushed_; }
  // Runs when a kernel is launched, with its name, its blocks and its argument.
  std::function<void(const std::string&, unsigned, void*)> on_launch;

 private:
  friend struct Recorded;
  cuda::DriverApi api_;
  std::vector<std::string> calls_;
  std::map<std::string, CUresult> failures_;
  std::set<std::string> alive_;
  std::map<std::size_t, std::string> functions_;  // kernels by handle
  std::map<CUdeviceptr, std::unique_ptr<std::byte[]>> memory_;
  bool events_done_ = true;
  int pushed_ = 0;
  std::size_t handles_ = 0;
};

}  // namespace horoplug::testing
