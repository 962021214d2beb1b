// The fusion buffers that the ranks of one host have on their GPUs, mapped into each other's
// processes (CUDA IPC), and how their streams meet.
//
// A buffer has two halves, which rounds use in turn. In a round a rank writes to its own half, its
// stream meets the others', and it reads what they have written to theirs. What a rank has put into
// its stream before a meeting is done before what others put into theirs after it. No half is
// written while somebody reads it: of round r a rank reads in its stream before its first meeting
// of round r + 1, and the half is written again in round r + 2, after that. Within a round a rank
// may meet the others again; what it has written since it met them last, nobody else may have read
// before.
//
// Streams meet in words of a page of the host's memory, one of each rank: in meeting m a rank's
// stream writes m to its own and waits until all others are at least m. Processors have no part in
// it: a wait may be in a stream before what it waits for is in the other one. It also ends if a
// rank dies, as any other one can write its word; of an event of a process that was killed nobody
// knows the end.
//
// Rounds and meetings are counted by each rank by itself, so they may only be begun in what all
// ranks do for certain.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "device/cuda/kernels/tables.h"
#include "device/cuda/runtime/device.h"

namespace horoplug::cuda {

// For whoever drives the engine. Everything throws Error.
class IpcPeers {
 public:
  // Bytes of a half: as many as the GPU has, within these bounds. More would not be faster; with
  // less, a buffer might share what is mapped with other allocations of this process.
  static constexpr std::size_t kMostBytes = 32 << 20;
  static constexpr std::size_t kLeastBytes = 1 << 20;
  static constexpr std::size_t kLine = 64;
  static constexpr std::size_t kPageBytes = 4096;
  static constexpr int kMostRanks = kMaxSources;
  static_assert(kMostRanks * kLine <= kPageBytes);

  // What a rank tells the others.
  struct Offer {
    CUipcMemHandle buffer;
    std::uint64_t half_bytes;
  };

  // Allocates the buffer of rank `rank` of `size` ranks on one host. All of them have `page`, which
  // is of zeros.
  IpcPeers(std::shared_ptr<Device> device, int rank, int size, std::byte* page);
  ~IpcPeers();  // closes them, too
  IpcPeers(const IpcPeers&) = delete;
  IpcPeers& operator=(const IpcPeers&) = delete;

  Offer offer() const;
  // By rank. The smallest half decides.
  void open(std::span<const Offer> offers);

  std::size_t half_bytes() const { return half_bytes_; }
  // A rank's half of this round.
  CUdeviceptr half(int rank) const;
  CUdeviceptr own_half() const { return half(rank_); }
  // The stream, always the same one, meets those of all other ranks.
  void meet(CUstream stream);
  void end_round() { ++round_; }

  // Whether all ranks' streams have come to their end, and all have closed the others' buffers, so
  // that each one's memory is its own again. All ranks ask, again and again, once everything is in
  // the stream.
  bool over(CUstream stream);
  // Closes the others' buffers, of which nothing in the stream reads any more.
  void close() noexcept;
  // Lets all ranks' streams go on, as somebody will not come: what they read now is undefined. What
  // others have in their streams may stop them again; calling it until the own stream is done helps
  // against that.
  void release() noexcept;

 private:
  std::atomic_ref<std::uint32_t> word(int rank) const;
  CUdeviceptr word_on_device(int rank) const;
  void allocate();
  bool all_are_at(std::uint32_t meeting) const;

  const std::shared_ptr<Device> device_;
  const int rank_, size_;
  std::byte* const page_;
  CUdeviceptr page_on_device_ = 0;
  std::unique_ptr<DeviceMemory> own_;
  std::vector<CUdeviceptr> buffers_;  // by rank; 0: not open
  std::size_t half_bytes_ = 0;
  std::uint64_t round_ = 0;
  std::uint32_t meeting_ = 0;  // after 2^32 - 1 comes 0
  enum class Farewell { kNone, kInStream, kClosed } farewell_ = Farewell::kNone;
  EventPtr last_;  // of all that is in the stream
};

}  // namespace horoplug::cuda
