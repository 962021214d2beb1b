#include "device/cuda/runtime/launcher.h"

#include <algorithm>
#include <array>
#include <bit>

#include "base/status.h"

namespace horoplug::cuda {
namespace {

// As many blocks of 256 threads as an SM can hold; further blocks wait for others to end.
constexpr std::uint32_t kBlocksPerMultiprocessor = 8;

std::string of_dtype(const char* kernel, DType dtype) {
  if (!has_adasum(dtype)) {
    throw Error(HP_UNSUPPORTED, std::string("Adasum needs floats, not ") + dtype_name(dtype));
  }
  return std::string(kernel) + "_" + dtype_name(dtype);
}

template <typename T>
T* pointer(std::uint64_t address) {
  return std::bit_cast<T*>(address);
}

}  // namespace

Launcher::Launcher(const Context& context, std::shared_ptr<LoadedKernels> kernels)
    : context_(context),
      kernels_(std::move(kernels)),
      stream_(context),
      tables_(context, stream_.handle()) {}

void Launcher::move(DType from, DType to, const Finish& finish,
                    std::span<const Transfer> transfers) {
  const BatchTable table = make_table(transfers, {dtype_size(from), dtype_size(to)});
  if (table.tiles == 0) return;
  MoveArgs args{place(table), finish_args(from, finish)};
  launch(move_kernel(from, to, finish), args, table.tiles);
}

void Launcher::move_reduced(DType dtype, const Finish& finish,
                            std::span<const Transfer> transfers) {
  const bool has_nan = is_floating(dtype) || is_complex(dtype);
  if (!has_nan || !finish.is_identity()) return move(dtype, dtype, finish, transfers);
  const BatchTable table = make_table(transfers, {dtype_size(dtype), dtype_size(dtype)});
  if (table.tiles == 0) return;
  // Finishing also canonicalises NaNs, whatever the factors are.
  MoveArgs args{place(table), {kMultiply, 0, 0, 1, 1}};
  launch(std::string("scale_") + dtype_name(dtype), args, table.tiles);
}

void Launcher::reduce(ReduceOp op, DType dtype, const Finish& finish,
                      std::span<const std::uint64_t> sources, std::span<const Transfer> transfers) {
  if (sources.empty() || sources.size() > kMaxSources) {
    throw Error(HP_UNSUPPORTED,
                "a reduction on a GPU has 1 to " + std::to_string(kMaxSources) + " sources");
  }
  const std::size_t size = dtype_size(dtype);
  const BatchTable table = make_table(transfers, {size, size}, sources);
  if (table.tiles == 0) return;
  ReduceArgs args{};
  args.batch = place(table);
  args.finish = finish_args(dtype, finish);
  args.sources = static_cast<std::uint32_t>(sources.size());
  std::transform(sources.begin(), sources.end(), args.source, pointer<const char>);
  launch(reduce_kernel(op, dtype), args, table.tiles);
}

void Launcher::dots(DType dtype, std::uint64_t a, std::uint64_t b,
                    std::span<const Transfer> transfers, std::uint64_t of_chunks) {
  const std::string name = of_dtype("dots", dtype);
  const std::size_t size = dtype_size(dtype);
  const BatchTable table = make_table(transfers, {size, size}, std::array{a, b});
  if (table.tiles == 0) return;
  const std::size_t bytes = table.tiles * sizeof(Dots);
  if (!of_tiles_ || of_tiles_->bytes() < bytes) {
    of_tiles_.reset();
    of_tiles_ = std::make_unique<DeviceMemory>(context_, std::bit_ceil(bytes), stream_.handle());
  }
  const Batch batch = place(table);
  DotsArgs args{batch, pointer<const char>(a), pointer<const char>(b),
                pointer<Dots>(of_tiles_->address())};
  launch(name, args, table.tiles);
  SumArgs sum{batch, args.of_tiles, pointer<Dots>(of_chunks)};
  launch("sum_of_tiles", sum, batch.chunk_count);
}

void Launcher::blend(DType dtype, std::uint64_t a, std::uint64_t b,
                     std::span<const Transfer> transfers, std::uint64_t of_chunks) {
  const std::string name = of_dtype("blend", dtype);
  const std::size_t result = std::max<std::size_t>(dtype_size(dtype), sizeof(float));
  const BatchTable table = make_table(transfers, {dtype_size(dtype), result}, std::array{a, b});
  if (table.tiles == 0) return;
  BlendArgs args{place(table), pointer<const char>(a), pointer<const char>(b),
                 pointer<const Dots>(of_chunks)};
  launch(name, args, table.tiles);
}

Batch Launcher::place(const BatchTable& table) {
  return {tables_.place(table.chunks), static_cast<std::uint32_t>(table.chunks.size()),
          table.tiles};
}

template <typename Args>
void Launcher::launch(const std::string& name, Args& args, std::uint32_t units) {
  const CUfunction function = kernels_->get(name);
  const auto processors = static_cast<std::uint32_t>(context_.properties().multiprocessors);
  const std::uint32_t blocks = std::min(units, std::max(processors, 1U) * kBlocksPerMultiprocessor);
  void* parameters[] = {&args};
  const Current current(context_);
  context_.check(context_.api().LaunchKernel(function, blocks, 1, 1, kThreads, 1, 1, 0,
                                             stream_.handle(), parameters, nullptr),
                 "cuLaunchKernel of " + name);
}

}  // namespace horoplug::cuda
