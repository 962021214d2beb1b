// What wire formats with error feedback (WireFormat::keeps_error) keep for each tensor of a process
// set on this rank: the residual, which the last encoding has lost and the next one adds.
//
// A batch reads what the last completed batch has left and writes a new state, which counts once
// the batch has completed. So a batch that is withdrawn or fails leaves nothing, and neither plans
// nor negotiation matter. The states belong to this rank alone: saved ones are to be loaded by a
// rank that contributes the same data. They end with the process set.
//
// For any thread.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/wire.h"

namespace horoplug {

class TensorStates {
 public:
  using Values = std::vector<float>;

  // The state of one tensor in one batch.
  struct Update {
    std::string key;
    std::shared_ptr<const Values> before;  // nullptr: nothing was lost yet
    std::shared_ptr<Values> after;         // to be written
    std::uint64_t edition = 0;             // that the batch has read
  };

  // Tensor number `index` of the operation with this name. A state of another size is ignored.
  Update begin(const std::string& name, std::size_t index, std::size_t elements);
  // The batch has completed. What has been reset or loaded meanwhile stays.
  void complete(std::vector<Update> updates);

  void reset();
  Bytes save() const;
  // Replaces all states. Throws WireError if the bytes are not those of save(), and changes
  // nothing.
  void load(std::span<const std::byte> saved);

 private:
  mutable std::mutex mutex_;
  std::map<std::string, std::shared_ptr<const Values>> states_;
  std::uint64_t edition_ = 0;  // reset() and load() so far
};

}  // namespace horoplug
