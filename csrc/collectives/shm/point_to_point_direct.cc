// A tensor through slots in shared memory: the sender copies chunk after chunk into the slots while
// the receiver copies the chunks before out of them.
#include "collectives/partition.h"
#include "collectives/point_to_point.h"
#include "device/cpu/kernels.h"

namespace horoplug {
namespace {

// Chunks until a transfer lets the engine do other work, even if the next chunk is ready.
constexpr std::size_t kChunksAtOnce = 8;
// Larger tensors do not fit in the receiver's cache, so that they are stored without going through
// it.
constexpr std::size_t kLarge = 8 << 20;

// Ends the present poll of the fiber; the next one continues.
class Yield final : public Waitable {
 public:
  // Asked when the coroutine awaits this, again by the same poll, and then by the next one.
  bool ready() override { return ++asked_ > 2; }
  void blame(std::vector<int>&) const override {}

 private:
  int asked_ = 0;
};

}  // namespace

Task send_direct(SlotLoan& loan, const std::byte* data, std::size_t bytes) {
  const std::size_t size = slot_chunk_bytes(bytes);
  for (std::size_t i = 0; i < chunk_count(bytes, size); ++i) {
    const Part chunk = chunk_of({0, bytes}, i, size);
    co_await loan.writable(i);
    kernels().copy(loan.data(i), data + chunk.begin, chunk.bytes);
    loan.fill(i);
    if (i % kChunksAtOnce == kChunksAtOnce - 1) co_await Yield();
  }
}

Task receive_direct(SlotLoan& loan, std::byte* data, std::size_t bytes) {
  const auto copy = bytes >= kLarge ? kernels().stream : kernels().copy;
  const std::size_t size = slot_chunk_bytes(bytes);
  for (std::size_t i = 0; i < chunk_count(bytes, size); ++i) {
    const Part chunk = chunk_of({0, bytes}, i, size);
    co_await loan.readable(i);
    copy(data + chunk.begin, loan.data(i), chunk.bytes);
    loan.empty(i);
    if (i % kChunksAtOnce == kChunksAtOnce - 1) co_await Yield();
  }
}

}  // namespace horoplug
