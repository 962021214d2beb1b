// One collective's view of its process set: ranks 0 … size-1, messages between them, and shared
// memory if they have it.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <vector>

#include "base/task.h"
#include "trace/batch_trace.h"
#include "transport/link.h"
#include "transport/shm/arena.h"

namespace horoplug {

// Working memory that a process set keeps between its collectives.
enum class Scratch : int { kWork = 0, kReceive };

class Comm {
 public:
  // `links` by rank of the set, nullptr at this rank's own place; `shared` is nullptr unless all
  // are on one host.
  Comm(int rank, std::vector<Link*> links, SharedGroup* shared)
      : rank_(rank), links_(std::move(links)), shared_(shared) {}

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(links_.size()); }
  SharedGroup* shared() const { return shared_; }

  // Enters and leaves the batch whose frames the calls below send and receive. `trace`, if there is
  // one, is told what happens in it.
  void begin(const Channel& channel, BatchTrace* trace = nullptr);
  void end();
  // Leaves a batch that not all ranks have joined, after its coroutine is gone: as if it had not
  // begun.
  void withdraw();
  // The plan of an epoch has ended: what peers have sent of it for this batch and those after it is
  // dropped (at once), and the ranks go on together from the same point (when what still runs of
  // the plan is done).
  void drop(const Channel& first_dropped);
  void resume();
  BatchTrace* trace() const { return trace_; }
  // The batch is a plan's: ranks join it unasked, and it may be withdrawn until all have.
  bool planned() const { return channel_.epoch != 0; }

  // Queues a message of at most kChunkBytes to a rank. `data` must stay as it is until flushed().
  void send(int rank, const void* data, std::size_t bytes);
  // Posts the receive of the next message from a rank.
  Link::Receive receive(int rank, void* data, std::size_t bytes) {
    return {link(rank), channel_, data, bytes};
  }

  // The same, appended to a window of posted receives.
  void post(std::deque<Link::Receive>& window, int rank, void* data, std::size_t bytes) {
    window.emplace_back(link(rank), channel_, data, bytes);
  }

  // At least `bytes` bytes of working memory, aligned to cache lines; valid until the next call for
  // the same purpose.
  std::byte* scratch(Scratch purpose, std::size_t bytes);

  // Waits until everything that was sent in this batch has left.
  class Flushed final : public Waitable {
   public:
    explicit Flushed(const Comm& comm) : comm_(comm) {}
    bool ready() override;
    void blame(std::vector<int>& ranks) const override;

   private:
    const Comm& comm_;
  };
  Flushed flushed() const { return Flushed(*this); }

  // Messages are cut into pieces of this size, so that a piece is still in the cache when it is
  // reduced, and the next one travels meanwhile.
  static constexpr std::size_t kChunkBytes = 256 * 1024;

 private:
  Link& link(int rank) const { return *links_[static_cast<std::size_t>(rank)]; }

  const int rank_;
  std::vector<Link*> links_;
  SharedGroup* const shared_;
  Channel channel_;
  BatchTrace* trace_ = nullptr;
  std::array<std::pair<std::unique_ptr<std::byte[]>, std::size_t>, 2> scratch_;
  std::vector<std::uint64_t> tickets_;  // last frame sent to each rank in this batch
};

}  // namespace horoplug
