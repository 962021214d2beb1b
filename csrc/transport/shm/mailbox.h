// The memory through which the ranks of one host send each other the frames of their links.
//
// Each rank has a mailbox in its segment: one ring for each other rank of the host, which that rank
// writes and the owner reads, and a bit for each ring that says "something new". An owner looks at
// the bits only, so that the cost of a look does not depend on the number of ranks.
//
// A writer copies bytes into its ring, counts up `written`, sets its bit, and rings the owner's
// doorbell if the owner sleeps in an operation. An owner that rests is often about to call the next
// operation, which finds the bytes; so its doorbell is rung a little later, and only if it has not
// read them (MailboxStream::ring_if_unread). The owner clears the bits before it reads the rings,
// so that bytes that come meanwhile set their bit again. It copies bytes out and counts up `read`.
// A writer that finds no space sets `full` and looks at `read` once more; an owner that has read
// looks at `full` and rings the writer's doorbell. Each side has a full fence between its two
// steps.
//
// A connection carries what a rank sends until the receiver reads its mailbox (`open`). `begins`
// tells the receiver how much was sent over it before the ring took over.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/cache_line.h"
#include "transport/shm/segment.h"

namespace horoplug {

class Mailbox {
 public:
  using Counter = std::atomic<std::uint64_t>;
  static_assert(Counter::is_always_lock_free);

  // Small enough to stay in the cache of a core, large enough for the data of a small tensor and
  // the messages beside it. Rings that were never used take no memory.
  static constexpr std::size_t kRingBytes = 64 << 10;
  // The ranks of a host that can have mailboxes: their bits lie in one cache line.
  static constexpr std::size_t kWords = kCacheLine / sizeof(std::uint64_t);
  static constexpr std::size_t kMostRanks = kWords * 64;

  struct Ring {
    // Written by the writer.
    alignas(kCacheLine) Counter written{0};
    Counter begins{0};  // 1 + the bytes that were sent over the connection; 0: not known yet
    std::atomic<std::uint32_t> full{0};
    // Written by the owner of the mailbox.
    alignas(kCacheLine) Counter read{0};
    std::atomic<std::uint32_t> open{0};  // the owner reads the ring
    alignas(kCacheLine) std::byte data[kRingBytes];
  };
  using News = std::array<Counter, kWords>;

  // Of a mailbox on a host with so many ranks.
  static constexpr std::size_t bytes(std::size_t ranks) {
    return kHeaderBytes + ranks * kBytesPerRing;
  }

  explicit Mailbox(Segment segment) : segment_(std::move(segment)) {}

  // The bit of writer i is bit i mod 64 of word i / 64.
  News& news() const { return *reinterpret_cast<News*>(segment_.data()); }
  // The ring of a writer, by its position among the ranks of the host.
  Ring& ring(std::size_t writer) const {
    return *reinterpret_cast<Ring*>(segment_.data() + kHeaderBytes + writer * kBytesPerRing);
  }

 private:
  static constexpr std::size_t kHeaderBytes = 4096;
  static constexpr std::size_t kPage = 4096;
  static constexpr std::size_t kBytesPerRing = (sizeof(Ring) + kPage - 1) / kPage * kPage;

  Segment segment_;
};

}  // namespace horoplug
