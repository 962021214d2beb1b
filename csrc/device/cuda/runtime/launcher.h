// Launches the kernels: one launch per batch, on one stream, without blocking the calling thread.
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

// For one thread at a time. All addresses are in GPU memory, or in memory that the GPU can access;
// transfers are described in batch.h. Order relative to other streams requires events: see Stream.
// Every function throws Error, which names the kernel.
class Launcher {
 public:
  Launcher(const Context& context, std::shared_ptr<LoadedKernels> kernels);
  // With kernels loaded for this launcher alone.
  Launcher(const Context& context, ImageSource images)
      : Launcher(context, std::make_shared<LoadedKernels>(context, std::move(images))) {}

  const Stream& stream() const { return stream_; }

  // Packs or unpacks: to = convert(finish(from)).
  void move(DType from, DType to, const Finish& finish, std::span<const Transfer> transfers);
  // The same for data that reduce() has not reduced: every NaN becomes the canonical one.
  void move_reduced(DType dtype, const Finish& finish, std::span<const Transfer> transfers);

  // Reduces the sources' data at `from` into `to`, as ReduceFn of device/cpu/kernels.h does. At
  // most kMaxSources sources. kAverage equals kSum: the caller divides.
  void reduce(ReduceOp op, DType dtype, const Finish& finish,
              std::span<const std::uint64_t> sources, std::span<const Transfer> transfers);

  // Adasum's dot products of `a` and `b` at each `from`: one Dots for each transfer, which must not
  // be empty, written to `of_chunks`.
  void dots(DType dtype, std::uint64_t a, std::uint64_t b, std::span<const Transfer> transfers,
            std::uint64_t of_chunks);

  // Combines the vectors, given their dot products, as float32 (float64 for float64).
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
  std::unique_ptr<DeviceMemory> of_tiles_;  // grows on demand
};

}  // namespace horoplug::cuda
