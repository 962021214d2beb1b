#include "collectives/mpi/common.h"

#include <algorithm>
#include <array>
#include <string>

namespace horoplug {

void mpi_has_failed(const std::system_error& error) {
  throw Error(HP_ABORTED, std::string("MPI has failed: ") + error.code().message());
}

bool MpiEnd::ready() {
  try {
    return comm_.mpi()->test(request_);
  } catch (const std::system_error& error) {
    mpi_has_failed(error);
  }
}

// Adding -0.0 leaves every value unchanged except NaNs.
void finish_reduction(const Call& call, std::byte* data, std::size_t elements) {
  if (!is_floating(call.dtype)) {
    const void* const source = data;
    if (!call.finish.is_identity()) call.reduce(data, &source, 1, elements, call.finish);
    return;
  }
  constexpr std::size_t kBlock = 512;
  std::array<std::byte, kBlock * sizeof(double)> zeros{};
  const std::size_t element = dtype_size(call.dtype);
  // -0.0 of any float type: the highest bit, in the last byte.
  for (std::size_t i = 1; i <= kBlock; ++i) zeros[i * element - 1] = std::byte{0x80};
  const ReduceFn sum =
      kernels().reduce[static_cast<int>(ReduceOp::kSum)][static_cast<int>(call.dtype)];
  for (std::size_t at = 0; at < elements; at += kBlock) {
    std::byte* const block = data + at * element;
    const void* const sources[] = {block, zeros.data()};
    sum(block, sources, 2, std::min(kBlock, elements - at), call.finish);
  }
}

MpiParts::MpiParts(std::byte* memory, std::span<const std::size_t> bytes, std::size_t unit) {
  int* const sizes = reinterpret_cast<int*>(memory);
  int* const begins = sizes + bytes.size();
  std::size_t at = 0;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    sizes[i] = static_cast<int>(bytes[i] / unit);
    begins[i] = static_cast<int>(at / unit);
    at += bytes[i];
  }
  table_ = {sizes, begins};
}

}  // namespace horoplug
