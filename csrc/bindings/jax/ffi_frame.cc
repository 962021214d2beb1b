#include "ffi_frame.h"

#include <algorithm>
#include <array>

namespace horoplug::jax {
namespace {

constexpr xla::DataType kInt64 = static_cast<xla::DataType>(5);
constexpr xla::DataType kFloat64 = static_cast<xla::DataType>(12);

// hp_dtype by XLA's numbers; -1: the core has no such type.
constexpr int kMaxType = std::max({
#define HP_DTYPE(code, NAME, Name, name, bytes, family, c_type, mantissa, nccl, since, mpi, numpy, \
                 dlpack, tf, xla)                                                                  \
  xla,
#include "horoplug/dtypes.def"
});
constexpr auto kDataTypes = [] {
  std::array<std::int32_t, kMaxType + 1> types{};
  types.fill(-1);
#define HP_DTYPE(code, NAME, Name, name, bytes, family, c_type, mantissa, nccl, since, mpi, numpy, \
                 dlpack, tf, xla)                                                                  \
  if ((xla) >= 0) types[xla] = code;
#include "horoplug/dtypes.def"
  return types;
}();

std::int32_t data_type(xla::DataType type) {
  const auto index = static_cast<std::size_t>(type);
  const std::int32_t known = index < kDataTypes.size() ? kDataTypes[index] : -1;
  if (known < 0) throw Failure(xla::kInvalidArgument, "arrays of this dtype are not supported");
  return known;
}

}  // namespace

Failure Failure::of(hp_status status, const std::string& subject) {
  std::string reason = hp_last_error();
  if (!subject.empty() && reason.find(subject) == std::string::npos) {
    reason = subject + ": " + reason;
  }
  xla::ErrorCode code = xla::kUnknown;
  switch (status) {
    case HP_INVALID_ARGUMENT:
    case HP_DUPLICATE_NAME:
    case HP_UNSUPPORTED:
      return {xla::kInvalidArgument, reason, status, reason};
    case HP_MISMATCH:
    case HP_DEADLOCK:
      code = xla::kFailedPrecondition;
      break;
    case HP_INTERNAL:
      code = xla::kInternal;
      break;
    default:
      break;
  }
  // horoplug/_keras/backends/jax.py recognises failures of the job by this text.
  return {code, "a Horovod operation has failed: " + reason, status, reason};
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
