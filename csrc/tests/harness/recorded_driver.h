// A driver without a GPU. It records calls, its handles are only numbers, and GPU memory is host
// memory.
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
  // At most one exists per thread, because the driver functions have no argument to find it by.
  RecordedDriver();
  ~RecordedDriver();
  RecordedDriver(const RecordedDriver&) = delete;
  RecordedDriver& operator=(const RecordedDriver&) = delete;

  const cuda::DriverApi& api() const { return api_; }

  // Returns and clears the recorded calls: module loads, launches, copies, and waits and records of
  // events, as text: "launch copy_32 <<<8>>> stream 2".
  std::vector<std::string> take_calls();
  // Makes all further calls of a function fail: fail("cuMemAlloc", 2).
  void fail(const std::string& function, CUresult result) { failures_[function] = result; }
  // Whether cuEventQuery reports that events are done.
  void set_events_done(bool done) { events_done_ = done; }
  // The number of objects that were created and not destroyed.
  std::size_t alive() const { return alive_.size(); }
  // The number of contexts that were pushed and not popped.
  int pushed() const { return pushed_; }
  // Called on each kernel launch with the kernel's name, the number of blocks and its argument.
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
