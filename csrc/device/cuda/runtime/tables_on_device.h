// The tables of batches on the GPU. A training step launches the same batches again and again: a
// table that is there already is not copied once more.
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
  // For the kernels of one stream. From so many `slots` on, the memory of the table that was not
  // used for longest is used again, if it is large enough.
  TablesOnDevice(const Context& context, CUstream stream, std::size_t slots = 256);

  // Where the GPU has these chunks, for kernels that are put into the stream before the next call.
  // Neither blocks nor waits.
  const Chunk* place(std::span<const Chunk> chunks);

  std::uint64_t copies() const { return copies_; }

 private:
  // The host's copy may be changed when `copied` is done. The GPU's may be at any time: the copy
  // to it comes after the kernels that use it.
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
  std::span<Chunk> on_host(std::size_t chunks);

  const Context& context_;
  CUstream stream_;
  std::size_t limit_;
  std::uint64_t uses_ = 0, copies_ = 0;
  // Memory of the host, for many slots: the driver may keep the host when it allocates some.
  std::vector<std::unique_ptr<PinnedMemory>> on_host_;
  std::span<Chunk> free_on_host_;
  std::vector<std::unique_ptr<Slot>> slots_;
};

}  // namespace horoplug::cuda
