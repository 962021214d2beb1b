// Launches the kernels: one launch per batch, on one stream, and never a wait of the host.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "device/cuda/runtime/batch.h"
#include "device/cuda/runtime/context.h"
#include "device/cuda/runtime/loaded_kernels.h"
#include "device/cuda/runtime/tables_on_device.h"

namespace horoplug::cuda {

// For one thread at a time. All addresses are the GPU's, or memory that it can reach; transfers
// are explained in batch.h. Work that uses memory of other streams has to be ordered by events: see
// Stream. Everything throws Error, which names the kernel.
class Launcher {
 public:
  Launcher(const Context& context, std::shared_ptr<LoadedKernels> kernels);
  // With kernels of its own.
  Launcher(const Context& context, ImageSource images)
      : Launcher(context, std::make_shared<LoadedKernels>(context, std::move(images))) {}

  const Stream& stream() const { return stream_; }

  // Packs or unpacks: to = convert(finish(from)).
  void move(DType from, DType to, const Finish& finish, std::span<const Transfer> transfers);
  // The same, of what was not reduced by reduce(): every NaN becomes the one of all results.
  void move_reduced(DType dtype, const Finish& finish, std::span<const Transfer> transfers);

  // Reduces what the sources have at `from` into `to`, as ReduceFn of device/cpu/kernels.h. At most
  // kMaxSources. kAverage is kSum: the division is the caller's.
  void reduce(ReduceOp op, DType dtype, const Finish& finish,
              std::span<const std::uint64_t> sources, std::span<const Transfer> transfers);

  // Adasum's dot products of what `a` and `b` have at each `from`: one Dots for each transfer,
  // which must not be empty, at `of_chunks`.
  void dots(DType dtype, std::uint64_t a, std::uint64_t b, std::span<const Transfer> transfers,
            std::uint64_t of_chunks);

  // Combines them, given the dot products of each, as float32 (float64 for float64).
  void blend(DType dtype, std::uint64_t a, std::uint64_t b, std::span<const Transfer> transfers,
             std::uint64_t of_chunks);

  std::uint64_t table_copies() const { return tables_.copies(); }

 private:
  Batch place(const BatchTable& table);
  template <typename Args>
  void launch(const std::string& name, Args& args, std::uint32_t units);

  const Context& context_;
  const std::shared_ptr<LoadedKernels> kernels_;
  Stream stream_;
  TablesOnDevice tables_;
  std::unique_ptr<DeviceMemory> of_tiles_;  // grows
};

}  // namespace horoplug::cuda
