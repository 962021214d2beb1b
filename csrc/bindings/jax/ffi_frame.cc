#include "ffi_frame.h"

#include <algorithm>
#include <iterator>

#include "../common/core_failure.h"

namespace horoplug::jax {
namespace {

constexpr xla::DataType kInt64 = static_cast<xla::DataType>(5);
constexpr xla::DataType kFloat64 = static_cast<xla::DataType>(12);

// XLA's number of each hp_dtype; negative: it has no such type.
constexpr int kNumbers[] = {
#define HP_DTYPE(code, NAME, Name, name, bytes, family, c_type, mantissa, nccl, since, mpi, numpy, \
                 dlpack, tf, xla)                                                                  \
  xla,
#include "horoplug/dtypes.def"
};

std::int32_t data_type(xla::DataType type) {
  const auto* const found = std::ranges::find(kNumbers, static_cast<int>(type));
  if (type < 0 || found == std::end(kNumbers)) {
    throw Failure(xla::kInvalidArgument, "arrays of this dtype are not supported");
  }
  return static_cast<std::int32_t>(found - kNumbers);
}

}  // namespace

Failure Failure::of(hp_status status, const std::string& subject) {
  std::string reason = hp_last_error();
  if (!subject.empty() && reason.find(subject) == std::string::npos) {
    reason = subject + ": " + reason;
  }
  const auto failure = bindings::core_failure(status, reason);
  return {static_cast<xla::ErrorCode>(failure.code), failure.message, status, reason};
}

Tensor::Tensor(const xla::Buffer& buffer)
    : dtype(data_type(buffer.dtype)),
      data(buffer.data),
      shape(buffer.dims, buffer.dims + buffer.rank) {}

std::size_t Tensor::bytes() const {
  std::size_t count = hp_dtype_size(dtype);
  for (const std::int64_t dimension : shape) count *= static_cast<std::size_t>(dimension);
  return count;
}

std::vector<Tensor> tensors_of(const xla::Buffers& buffers) {
  std::vector<Tensor> tensors;
  tensors.reserve(static_cast<std::size_t>(buffers.size));
  for (std::int64_t i = 0; i < buffers.size; ++i) {
    if (buffers.buffers[i]->dtype != xla::kToken) tensors.emplace_back(*buffers.buffers[i]);
  }
  return tensors;
}

const void* Attributes::find(std::string_view name, xla::AttributeType type) const {
  for (std::int64_t i = 0; i < attributes_.size; ++i) {
    const xla::ByteSpan& here = *attributes_.names[i];
    if (std::string_view(here.data, here.size) != name) continue;
    if (attributes_.types[i] == type) return attributes_.values[i];
    break;
  }
  throw Failure(xla::kInternal, "the call has no attribute " + std::string(name) +
                                    " of the expected type: build or install horoplug again");
}

const void* Attributes::scalar(std::string_view name, xla::DataType dtype) const {
  const auto& found = *static_cast<const xla::Scalar*>(find(name, xla::kScalar));
  if (found.dtype != dtype) {
    throw Failure(xla::kInternal, "the attribute " + std::string(name) + " has the wrong dtype");
  }
  return found.value;
}

std::string Attributes::text(std::string_view name) const {
  const auto& found = *static_cast<const xla::ByteSpan*>(find(name, xla::kString));
  return {found.data, found.size};
}

double Attributes::number(std::string_view name) const {
  return *static_cast<const double*>(scalar(name, kFloat64));
}

std::int32_t Attributes::integer(std::string_view name) const {
  return static_cast<std::int32_t>(*static_cast<const std::int64_t*>(scalar(name, kInt64)));
}

std::vector<std::int64_t> Attributes::integers(std::string_view name) const {
  const auto& found = *static_cast<const xla::Array*>(find(name, xla::kArray));
  if (found.size > 0 && found.dtype != kInt64) {
    throw Failure(xla::kInternal, "the attribute " + std::string(name) + " has the wrong dtype");
  }
  const auto* const values = static_cast<const std::int64_t*>(found.data);
  return {values, values + found.size};
}

}  // namespace horoplug::jax
