// The fusion buffers of the ranks of one host on their GPUs, mapped into each other's processes by
// CUDA IPC, and the synchronisation of their streams.
//
// A buffer has two halves, which rounds use alternately. In a round a rank writes to its own half,
// its stream passes a barrier of all ranks' streams, and it reads the other ranks' halves. Work
// that a rank enqueued before a barrier is done before work that other ranks enqueue after it. No
// half is written while another rank reads it: a rank reads data of round r in its stream before
// its first barrier of round r + 1, and the half is written again in round r + 2, after that. A
// round may have further barriers; data that a rank has written since its last one must not have
// been read by others before.
//
// The barriers use a page of the CPU's memory with one word for each rank: in barrier b a rank's
// stream writes b to its word and waits until all other words are at least b. The CPUs take no part
// in it: a stream may wait before the matching write is enqueued in another stream. A wait also
// ends if a rank dies, because any other rank can write its word. An event of a killed process, by
// contrast, would never complete.
//
// Each rank counts rounds and barriers by itself, so they may only begin in operations that all
// ranks are certain to run.
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

// For the thread that runs the progress loop. Every function throws Error.
class IpcPeers {
 public:
  // The size of a half in bytes: limited by free memory, within these bounds. More would not be
  // faster. With less, the buffer might share its mapping with other allocations of this process.
  static constexpr std::size_t kMostBytes = 32 << 20;
  static constexpr std::size_t kLeastBytes = 1 << 20;
  static constexpr std::size_t kLine = 64;
  static constexpr std::size_t kPageBytes = 4096;
  static constexpr int kMostRanks = kMaxSources;
  static_assert(kMostRanks * kLine <= kPageBytes);

  // The information that ranks exchange.
  struct Offer {
    CUipcMemHandle buffer;
    std::uint64_t half_bytes;
  };

  // Allocates the buffer of rank `rank` of `size` ranks on one host. All of them map `page`, which
  // is zeroed.
  IpcPeers(std::shared_ptr<Device> device, int rank, int size, std::byte* page);
  ~IpcPeers();  // also closes the other ranks' buffers
  IpcPeers(const IpcPeers&) = delete;
  IpcPeers& operator=(const IpcPeers&) = delete;

  Offer offer() const;
  // By rank. The smallest half determines the size.
  void open(std::span<const Offer> offers);

  std::size_t half_bytes() const { return half_bytes_; }
  // A rank's half in this round.
  CUdeviceptr half(int rank) const;
  CUdeviceptr own_half() const { return half(rank_); }
  // Enqueues a barrier of all ranks' streams. This rank's stream must always be the same one.
  void barrier(CUstream stream);
  void end_round() { ++round_; }

  // Whether all ranks' streams have finished and all ranks have closed the others' buffers, so that
  // each rank owns its memory alone again. All ranks must poll this once all work is enqueued.
  bool closed_by_all(CUstream stream);
  // Closes the other ranks' buffers, which no work in the stream reads any more.
  void close() noexcept;
  // Releases the waits of all ranks' streams, because a rank will not take part: the data they read
  // is undefined. Work that other ranks enqueue may block them again, so this is called repeatedly
  // until this rank's stream is done.
  void release() noexcept;

 private:
  std::atomic_ref<std::uint32_t> word(int rank) const;
  CUdeviceptr word_on_device(int rank) const;
  void allocate();
  bool all_have_reached(std::uint32_t barrier) const;

  const std::shared_ptr<Device> device_;
  const int rank_, size_;
  std::byte* const page_;
  CUdeviceptr page_on_device_ = 0;
  std::unique_ptr<DeviceMemory> own_;
  std::vector<CUdeviceptr> buffers_;  // by rank; 0: not mapped
  std::size_t half_bytes_ = 0;
  std::uint64_t round_ = 0;
  std::uint32_t barrier_ = 0;  // the last one's number; wraps from 2^32 - 1 to 0
  enum class Closing { kNotBegun, kWaitsForStream, kClosed } closing_ = Closing::kNotBegun;
  EventPtr last_;  // the end of all work in the stream
};

}  // namespace horoplug::cuda
