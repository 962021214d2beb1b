#include "collectives/gpu/gpu_turns.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "collectives/allgather_fixed.h"

namespace horoplug {

class GpuTurn::First final : public Waitable {
 public:
  explicit First(const GpuTurn& turn) : turn_(turn) {}
  bool ready() override { return first().first == turn_.set_; }
  void blame(std::vector<int>& ranks) const override { first().second.comm->everyone_else(ranks); }

 private:
  // Ties go to the lower process-set id.
  const std::pair<const std::uint32_t, GpuTurns::Turn>& first() const {
    const auto& places = turn_.turns_.waiting_;
    return *std::min_element(places.begin(), places.end(), [](const auto& a, const auto& b) {
      return a.second.number < b.second.number;
    });
  }

  const GpuTurn& turn_;
};

Task GpuTurn::come(Comm& comm) {
  // A batch that may still be withdrawn is not waited for.
  if (comm.planned()) co_await barrier(comm);
  comm.commit();
  std::uint64_t& number = (turns_.waiting_[set_] = {++turns_.highest_, &comm}).number;
  if (comm.size() > 1) {
    const std::uint64_t proposed = number;
    std::vector<std::uint64_t> all;
    co_await allgather_fixed(comm, proposed, all);
    number = *std::max_element(all.begin(), all.end());
    turns_.highest_ = std::max(turns_.highest_, number);
  }
  co_await First(*this);
  if (comm.size() > 1) co_await barrier(comm);
}

}  // namespace horoplug
