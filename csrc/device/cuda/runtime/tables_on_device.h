// The tables of batches in GPU memory. A training step launches the same batches repeatedly: a
// table that is already there is not copied again.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "device/cuda/kernels/tables.h"
#include "device/cuda/runtime/context.h"

namespace horoplug::cuda {

class TablesOnDevice {
 public:
  // For the kernels of one stream. Beyond `slots` tables, the memory of the least recently used
  // table is reused if it is large enough.
  TablesOnDevice(const Context& context, CUstream stream, std::size_t slots = 256);

  // The address of these chunks on the GPU, for kernels that are enqueued before the next call.
  // Never blocks.
  const Chunk* place(std::span<const Chunk> chunks);

  std::uint64_t copies() const { return copies_; }

 private:
  // The CPU's copy may be changed when `copied` is done. The GPU's copy may be changed at any
  // time, because the copy to it is ordered behind the kernels that use it.
  struct Slot {
    Slot(const Context& context, std::span<Chunk> memory, CUstream stream);
    bool holds(std::span<const Chunk> chunks, std::uint64_t hash) const;
    std::size_t capacity, count = 0;
    std::uint64_t hash = 0, last_use = 0;
    Chunk* host;
    DeviceMemory device;
    Event copied;
  };
  Slot& slot_for(std::size_t chunks);
  std::span<Chunk> pinned(std::size_t chunks);

  const Context& context_;
  CUstream stream_;
  std::size_t limit_;
  std::uint64_t uses_ = 0, copies_ = 0;
  // Memory of the CPU for many slots at once: the driver may block the calling thread when it
  // allocates.
  std::vector<std::unique_ptr<PinnedMemory>> pinned_;
  std::span<Chunk> free_pinned_;
  std::vector<std::unique_ptr<Slot>> slots_;
};

}  // namespace horoplug::cuda
