#include "engine/operations/submission.h"

#include <bit>
#include <cmath>
#include <limits>

#include "collectives/partition.h"
#include "device/cpu/kernels.h"

namespace horoplug {
namespace {

[[noreturn]] void reject(const std::string& text) { throw Error(HP_INVALID_ARGUMENT, text); }

template <typename Enum>
Enum checked(std::int32_t value, int count, const char* what) {
  if (value < 0 || value >= count) {
    reject("unknown " + std::string(what) + " " + std::to_string(value));
  }
  return static_cast<Enum>(value);
}

Shape checked_shape(const hp_tensor& tensor, std::size_t element) {
  if (tensor.ndim < 0 || (tensor.ndim > 0 && tensor.shape == nullptr)) {
    reject("a tensor without a shape");
  }
  Shape shape(tensor.shape, tensor.shape + tensor.ndim);
  std::int64_t left = std::numeric_limits<std::int64_t>::max() / static_cast<std::int64_t>(element);
  for (const std::int64_t dimension : shape) {
    if (dimension < 0) reject("a negative dimension in shape " + describe_shape(shape));
    if (dimension == 0) return shape;
    left /= dimension;
  }
  if (left == 0) reject("shape " + describe_shape(shape) + " has too many elements");
  return shape;
}

void check_adasum(const Signature& s, int size) {
  if (!has_adasum(s.wire_dtype())) {
    throw Error(HP_UNSUPPORTED, std::string("Adasum works on float16, bfloat16, float32 and ") +
                                    "float64, not on " + dtype_name(s.wire_dtype()) +
                                    "; cast the tensor");
  }
  if (!std::has_single_bit(static_cast<unsigned>(size))) {
    throw Error(HP_UNSUPPORTED, "Adasum works on 1, 2, 4, 8 ... ranks, not on " +
                                    std::to_string(size) +
                                    "; use a process set of so many ranks, or another reduction");
  }
}

void check_reduction(const Signature& s, int size) {
  if (s.reduce == ReduceOp::kAdasum && s.op != OpKind::kAllreduce) {
    throw Error(HP_UNSUPPORTED, std::string(op_kind_name(s.op)) + " cannot do adasum");
  }
  if (s.reduce == ReduceOp::kAverage && s.dtype == DType::kBool) {
    throw Error(HP_UNSUPPORTED,
                "bool tensors have no average; use Sum (any), Product (all) or cast");
  }
  if (s.reduce == ReduceOp::kAdasum) return check_adasum(s, size);
  if (reduction_of(s.reduce, s.dtype, s.wire) == nullptr) {
    throw Error(HP_UNSUPPORTED, std::string(op_kind_name(s.op)) + " cannot do " +
                                    reduce_op_name(s.reduce) + " on " +
                                    (s.wire != nullptr ? s.wire->name : dtype_name(s.dtype)));
  }
}

// Tensors of other types than float32 travel as they are.
const WireFormat* wire_format(const hp_submission& submission, const Signature& s) {
  const std::int32_t code = submission.wire_dtype;
  if (code == 0) return nullptr;
  const WireFormat* const format = find_wire_format(code);
  if (s.op != OpKind::kAllreduce || format == nullptr) {
    std::string known;
    for (const WireFormat& row : kWireFormats) {
      if (!row.offered) continue;
      known += (known.empty() ? "" : " or ") + std::string(row.name);
    }
    const char* const name = format != nullptr
                                 ? format->name
                                 : dtype_name(checked<DType>(code, kDTypeCount, "data type"));
    throw Error(HP_UNSUPPORTED, "compression is for allreduce, as " + known + ", not for " +
                                    op_kind_name(s.op) + " as " + name);
  }
  return s.dtype == DType::kFloat32 ? format : nullptr;
}

std::vector<std::int64_t> checked_splits(const Signature& signature,
                                         const hp_submission& submission, const Members& members) {
  const int size = members.size();
  const std::int64_t rows = rows_of(signature.shapes.front());
  const bool scatters = signature.op == OpKind::kScatter;
  if (scatters && members.index_of(signature.root) != members.index) {
    // The root's splits are the ones that apply.
    return std::vector<std::int64_t>(static_cast<std::size_t>(size), 0);
  }
  if (submission.splits == nullptr || submission.split_count == 0) {
    if (scatters) return even_rows(rows, size);
    if (rows % size != 0) {
      reject(
          "alltoall without splits needs a first dimension that is a multiple of the number of "
          "ranks: " +
          std::to_string(rows) + " is not a multiple of " + std::to_string(size) + "; give splits");
    }
    return std::vector<std::int64_t>(static_cast<std::size_t>(size), rows / size);
  }
  if (submission.split_count != size) {
    reject("splits has " + std::to_string(submission.split_count) + " entries for " +
           std::to_string(size) + " ranks; give one for each rank");
  }
  std::vector<std::int64_t> splits(submission.splits, submission.splits + size);
  std::int64_t left = rows;
  for (const std::int64_t split : splits) {
    if (split < 0) reject("a negative entry in splits");
    if (split > left) {
      reject("the entries of splits add up to more than the first dimension, " +
             std::to_string(rows));
    }
    left -= split;
  }
  if (left != 0) {
    reject("the entries of splits add up to " + std::to_string(rows - left) +
           ", not to the first dimension, " + std::to_string(rows));
  }
  return splits;
}

}  // namespace

Prepared prepare(const hp_submission& submission, const MembersPtr& members) {
  const int size = members->size();
  Prepared prepared;
  prepared.members = members;
  Signature signature;
  signature.op = checked<OpKind>(submission.op, kOpKindCount, "operation");
  const OperationInfo& info = operation_info(signature.op);
  if (is_administrative(signature.op)) {
    reject(std::string(op_kind_name(signature.op)) + " is not submitted, but has its own function");
  }
  signature.dtype = checked<DType>(submission.dtype, kDTypeCount, "data type");
  signature.reduce = checked<ReduceOp>(submission.reduce_op, kReduceOpCount, "reduction");
  signature.wire = wire_format(submission, signature);
  if (!info.reduces) signature.reduce = ReduceOp::kSum;
  // Ranks need not use GPUs with the same ordinal.
  signature.device = submission.device < 0 || !info.has_tensors ? -1 : 0;
  if (signature.device == 0) prepared.gpu = submission.device;
  const auto factor = [](double value) { return value == 0 ? 1.0 : value; };
  signature.prescale = factor(submission.prescale);
  signature.postscale = factor(submission.postscale);
  if (!std::isfinite(signature.prescale) || !std::isfinite(signature.postscale)) {
    reject("prescale and postscale factors must be finite");
  }
  std::string name;
  if (submission.name != nullptr) {
    name = submission.name;
    if (name.empty()) reject("empty operation name; pass a name or none");
    if (name.size() > kLongestName) {
      reject("a name of " + std::to_string(name.size()) + " bytes; names have at most " +
             std::to_string(kLongestName));
    }
  }
  signature.recurring = submission.name != nullptr;
  if (submission.layout != nullptr) signature.layout = submission.layout;
  if (signature.layout.size() > kLongestName) {
    reject("a layout of " + std::to_string(signature.layout.size()) +
           " bytes; layouts have at most " + std::to_string(kLongestName));
  }

  if (info.has_root) {
    signature.root = submission.root;
    const bool is_any_rank = signature.op == OpKind::kReceive && signature.root == HP_ANY_RANK;
    if (members->index_of(signature.root) < 0 && !is_any_rank) {
      const std::string root = (is_point_to_point(signature.op) ? "rank " : "root rank ") +
                               std::to_string(signature.root);
      if (members->set != 0) {
        reject(root + " is not in process set " + std::to_string(members->set) + " of " +
               describe_ranks(members->ranks));
      }
      reject(root + " does not exist; there are ranks 0 to " + std::to_string(size - 1));
    }
  }
  if (info.has_tensors) {
    if (submission.tensor_count < 1 || submission.tensors == nullptr) reject("no tensor given");
    for (int i = 0; i < submission.tensor_count; ++i) {
      Shape shape = checked_shape(submission.tensors[i], dtype_size(signature.dtype));
      if (info.needs_rows && shape.empty()) {
        reject(std::string(info.name) + " needs a tensor with at least one dimension");
      }
      signature.shapes.push_back(std::move(shape));
    }
    const bool takes_one = is_point_to_point(signature.op) || info.takes_splits;
    if (takes_one && submission.tensor_count != 1)
      reject(std::string(info.name) + " takes one tensor");
    if (is_point_to_point(signature.op)) {
      if (submission.tag < 0) {
        reject("tag " + std::to_string(submission.tag) + "; tags are 0 or more");
      }
      prepared.tag = submission.tag;
    }
    if (info.reduces) check_reduction(signature, size);
    if (info.takes_splits) prepared.splits = checked_splits(signature, submission, *members);
  }
  prepared.identity = make_identity(std::move(name), std::move(signature));
  return prepared;
}

OperationPtr make_operation(const Prepared& prepared, std::span<const TensorArgument> tensors,
                            void* stream, bool in_pool) {
  const Signature& signature = prepared.identity->signature;
  const OperationInfo& info = operation_info(signature.op);
  auto operation = std::make_shared<Operation>();
  operation->members = prepared.members;
  operation->identity = prepared.identity;
  operation->tag = prepared.tag;
  operation->splits = prepared.splits;
  operation->gpu.ordinal = prepared.gpu;
  if (prepared.gpu >= 0) operation->gpu.stream = static_cast<CUstream>(stream);
  operation->counts_caller = !in_pool;
  if (!info.has_tensors) return operation;

  const Members& members = *prepared.members;
  const bool is_root = info.has_root && members.index_of(signature.root) == members.index;
  const bool is_read =
      signature.op != OpKind::kReceive && (signature.op != OpKind::kScatter || is_root);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const TensorArgument& tensor = tensors[i];
    const bool has_data = elements_of(signature.shapes[i]) > 0;
    if (has_data && is_read && tensor.input == nullptr) reject("a tensor without memory");
    if (signature.op == OpKind::kScatter && tensor.output != nullptr) {
      reject("the output of this operation is allocated by the engine");
    }
    const bool needs_output = info.output == OpOutput::kSubmitted;
    if (has_data && needs_output && tensor.output == nullptr) reject("a tensor without an output");
  }
  operation->tensors.assign(tensors.begin(), tensors.end());
  return operation;
}

OperationPtr make_operation(const hp_submission& submission, const MembersPtr& members) {
  const Prepared prepared = prepare(submission, members);
  std::vector<TensorArgument> tensors;
  const OperationInfo& info = operation_info(prepared.identity->signature.op);
  for (int i = 0; info.has_tensors && i < submission.tensor_count; ++i) {
    const hp_tensor& tensor = submission.tensors[i];
    tensors.push_back(
        {static_cast<const std::byte*>(tensor.input), static_cast<std::byte*>(tensor.output)});
  }
  return make_operation(prepared, tensors, submission.stream, submission.pool_thread != 0);
}

OperationPtr make_administrative(OpKind op, const MembersPtr& members, const Shape& arguments) {
  auto operation = std::make_shared<Operation>();
  operation->members = members;
  Signature signature;
  signature.op = op;
  signature.recurring = false;
  signature.shapes = {arguments};
  // Only one join per process set can be in flight.
  operation->identity = make_identity(op == OpKind::kJoin ? op_kind_name(op) : "", signature);
  return operation;
}

OperationPtr make_absent(const Identity& identity, const MembersPtr& members) {
  auto operation = std::make_shared<Operation>();
  operation->members = members;
  operation->absent = true;
  operation->submitted_at = steady_now();
  Signature signature = identity.signature;
  const OperationInfo& info = operation_info(signature.op);
  for (Shape& shape : signature.shapes) {
    const hp_tensor tensor{nullptr, nullptr, shape.data(), static_cast<int32_t>(shape.size()), 0};
    try {
      checked_shape(tensor, dtype_size(signature.dtype));
    } catch (const Error& error) {
      throw Error(HP_INTERNAL,
                  "another rank has submitted an invalid operation: " + std::string(error.what()));
    }
    if (info.rows_differ && shape.empty()) shape = {0};
    if (info.rows_differ) shape.front() = 0;
    operation->tensors.emplace_back();
  }
  if (info.takes_splits) {
    operation->splits.assign(members->ranks.size(), 0);
  }
  operation->identity = make_identity(identity.name, std::move(signature));
  return operation;
}

}  // namespace horoplug
