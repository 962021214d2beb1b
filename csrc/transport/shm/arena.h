// The memory in which the ranks of one host communicate: each rank owns an arena with flags, flag
// lines and data slots, which all ranks can read.
//
// Large data passes through slots in cycles. Cycles are numbered from 1 for the life of the process
// set, identically on every rank. In cycle c a rank uses slot c mod kSlots of its arena, and
// publishes its progress in three counters that only it writes:
//     packed  >= c   its input of cycle c is in its slot
//     reduced >= c   its part of the result is in its slot
//     done    >= c   it no longer reads anything of cycle c
// A rank whose input is in memory that all ranks can read may publish `packed` without writing its
// slot. If another rank's input is not, the rank fills its slot after all, and all ranks
// synchronise on a fourth counter, `repacked`. A slot may be written again in cycle c once every
// rank is done with cycle c - kSlots. A rank waits for that (writable) before it publishes anything
// in cycle c, even if it has nothing to write.
//
// Small data passes through flag lines in exchanges, which have a numbering of their own. In
// exchange m a rank writes its flag line m mod 2 and waits for the flag lines of all ranks for m.
// No further counter is needed: a rank that has written for m has read everything of m - 1, so no
// rank still reads m - 2. HostMemory is the code that follows these rules.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/cache_line.h"
#include "transport/doorbell.h"
#include "transport/shm/segment.h"

namespace horoplug {

enum class Stage : int { kPacked = 0, kRepacked, kReduced, kDone };

class Arena {
 public:
  // Bytes of one slot: small enough that the data of a cycle stays in the rank's own cache, and
  // large enough to amortise the cycle's synchronisation.
  static constexpr std::size_t kSlotBytes = 256 << 10;
  static constexpr std::size_t kSlots = 3;
  // Data bytes of a flag line, which spans many cache lines: small data lies beside its flag.
  static constexpr std::size_t kLineBytes = 4 << 10;
  static constexpr std::size_t kLines = 2;

  using Counter = std::atomic<std::uint64_t>;
  // A counter and, for kPacked, the values that belong to it, indexed by cycle mod kSlots: the hash
  // of the batch, and the position of the input if it is not in the slot (see Call::place).
  struct alignas(kCacheLine) Flag {
    Counter counter{0};
    Counter checks[kSlots];
    Counter places[kSlots];
  };
  static_assert(sizeof(Flag) == kCacheLine);
  struct alignas(kCacheLine) FlagLine {
    Counter flag{0};  // the number of the exchange
    Counter check{0};
    std::byte data[kLineBytes];
  };
  struct Header {
    alignas(kCacheLine) Doorbell::Word asleep{0};
    Flag stages[4];
    FlagLine lines[kLines];
  };
  static constexpr std::size_t kPage = 4096;
  // The header ends with a page for the ranks' GPUs.
  static constexpr std::size_t kGpusAt = (sizeof(Header) + kPage - 1) / kPage * kPage;
  static constexpr std::size_t kHeaderBytes = kGpusAt + kPage;
  static constexpr std::size_t kSegmentBytes = kHeaderBytes + kSlots * kSlotBytes;

  explicit Arena(Segment segment) : segment_(std::move(segment)) {}

  Header& header() const { return *reinterpret_cast<Header*>(segment_.data()); }
  Flag& flag(Stage stage) const { return header().stages[static_cast<int>(stage)]; }
  FlagLine& line(std::uint64_t exchange) const { return header().lines[exchange % kLines]; }
  std::byte* gpus_page() const { return segment_.data() + kGpusAt; }
  std::byte* slot(std::uint64_t cycle) const {
    return segment_.data() + kHeaderBytes + (cycle % kSlots) * kSlotBytes;
  }

 private:
  Segment segment_;
};

}  // namespace horoplug
