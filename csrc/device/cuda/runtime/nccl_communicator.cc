#include "device/cuda/runtime/nccl_communicator.h"

#include <bit>
#include <chrono>
#include <thread>

#include "base/status.h"

namespace horoplug::cuda {
namespace {

// Values of ncclDataType_t and ncclRedOp_t.
constexpr ncclDataType_t kUint8 = 1;
constexpr ncclRedOp_t kSum = 0, kProduct = 1, kMaximum = 2, kMinimum = 3;

// Limit for the time that other ranks take to destroy a communicator.
constexpr auto kPatience = std::chrono::seconds(2);

template <typename T = void>
T* pointer(CUdeviceptr address) {
  return std::bit_cast<T*>(address);
}

// NCCL reduces 8-bit floats on GPUs from Hopper on.
constexpr int kFloat8Capability = 90;

struct Type {
  ncclDataType_t number;
  int since;
};
constexpr Type kTypes[] = {
#define HP_DTYPE(code, NAME, Name, name, bytes, family, c_type, mantissa, nccl, since, ...) \
  {nccl, since},
#include "horoplug/dtypes.def"
};

ncclDataType_t type_of(DType dtype) { return kTypes[static_cast<int>(dtype)].number; }

// The number of NCCL's elements in `count` elements.
std::size_t parts(DType dtype, std::size_t count) { return is_complex(dtype) ? 2 * count : count; }

}  // namespace

std::optional<ncclDataType_t> nccl_type(DType dtype, int version, int capability) {
  const Type& type = kTypes[static_cast<int>(dtype)];
  const bool is_float8 = is_floating(dtype) && dtype_size(dtype) == 1;
  if (type.number < 0 || version < type.since) return std::nullopt;
  if (is_float8 && capability < kFloat8Capability) return std::nullopt;
  return type.number;
}

std::optional<ncclRedOp_t> nccl_op(ReduceOp op, DType dtype) {
  const bool logical = dtype == DType::kBool;
  if (is_complex(dtype) && op != ReduceOp::kSum && op != ReduceOp::kAverage) return std::nullopt;
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
      return logical ? kMaximum : kSum;
    case ReduceOp::kProduct:
      return logical ? kMinimum : kProduct;
    case ReduceOp::kMax:
      return kMaximum;
    case ReduceOp::kMin:
      return kMinimum;
    default:
      return std::nullopt;
  }
}

ncclUniqueId NcclCommunicator::make_id(const Device& device) {
  const NcclApi& api = device.toolkit().nccl;
  ncclUniqueId id{};
  if (const ncclResult_t result = api.GetUniqueId(&id); result != kNcclSuccess) {
    throw Error(HP_ABORTED,
                std::string("NCCL: ncclGetUniqueId fails: ") + api.GetErrorString(result));
  }
  return id;
}

NcclCommunicator::NcclCommunicator(std::shared_ptr<Device> device, const ncclUniqueId& id, int size,
                                   int rank)
    : device_(std::move(device)), api_(device_->toolkit().nccl) {
  NcclConfig config;
  config.blocking = 0;
  const Current current(device_->context());
  check(api_.CommInitRankConfig(&communicator_, size, id, rank, &config), "ncclCommInitRank");
}

NcclCommunicator::~NcclCommunicator() { abort(); }

void NcclCommunicator::check(ncclResult_t result, const char* call) const {
  if (result == kNcclSuccess || result == kNcclInProgress) return;
  std::string text = std::string("NCCL: ") + call + " fails: " + api_.GetErrorString(result);
  const char* const more = api_.GetLastError(communicator_);
  if (more != nullptr && *more != '\0') text += std::string(" (") + more + ")";
  for (char& letter : text) {
    if (letter == '\n') letter = ' ';
  }
  throw Error(HP_ABORTED, text);
}

bool NcclCommunicator::settled() {
  ncclResult_t state = kNcclSuccess;
  check(api_.CommGetAsyncError(communicator_, &state), "ncclCommGetAsyncError");
  check(state, "an operation");
  return state == kNcclSuccess;
}

void NcclCommunicator::begin() const { check(api_.GroupStart(), "ncclGroupStart"); }
void NcclCommunicator::end() const {
  const Current current(device_->context());
  check(api_.GroupEnd(), "ncclGroupEnd");
}

void NcclCommunicator::allreduce(CUdeviceptr from, CUdeviceptr to, std::size_t count, DType dtype,
                                 ReduceOp op, CUstream stream) {
  const Current current(device_->context());
  check(api_.AllReduce(pointer(from), pointer(to), parts(dtype, count), type_of(dtype),
                       nccl_op(op, dtype).value(), communicator_, stream),
        "ncclAllReduce");
}

void NcclCommunicator::reducescatter(CUdeviceptr from, CUdeviceptr to, std::size_t count_of_each,
                                     DType dtype, ReduceOp op, CUstream stream) {
  const Current current(device_->context());
  check(api_.ReduceScatter(pointer(from), pointer(to), parts(dtype, count_of_each), type_of(dtype),
                           nccl_op(op, dtype).value(), communicator_, stream),
        "ncclReduceScatter");
}

void NcclCommunicator::reduce(CUdeviceptr from, CUdeviceptr to, std::size_t count, DType dtype,
                              ReduceOp op, int root, CUstream stream) {
  const Current current(device_->context());
  check(api_.Reduce(pointer(from), pointer(to), parts(dtype, count), type_of(dtype),
                    nccl_op(op, dtype).value(), root, communicator_, stream),
        "ncclReduce");
}

void NcclCommunicator::allgather(CUdeviceptr from, CUdeviceptr to, std::size_t bytes_of_each,
                                 CUstream stream) {
  const Current current(device_->context());
  check(api_.AllGather(pointer(from), pointer(to), bytes_of_each, kUint8, communicator_, stream),
        "ncclAllGather");
}

void NcclCommunicator::broadcast(CUdeviceptr from, CUdeviceptr to, std::size_t bytes, int root,
                                 CUstream stream) {
  const Current current(device_->context());
  check(api_.Broadcast(pointer(from), pointer(to), bytes, kUint8, root, communicator_, stream),
        "ncclBroadcast");
}

void NcclCommunicator::send(CUdeviceptr from, std::size_t bytes, int rank, CUstream stream) {
  const Current current(device_->context());
  check(api_.Send(pointer(from), bytes, kUint8, rank, communicator_, stream), "ncclSend");
}

void NcclCommunicator::receive(CUdeviceptr to, std::size_t bytes, int rank, CUstream stream) {
  const Current current(device_->context());
  check(api_.Recv(pointer(to), bytes, kUint8, rank, communicator_, stream), "ncclRecv");
}

void NcclCommunicator::close() {
  if (communicator_ == nullptr) return;
  const Current current(device_->context());
  check(api_.CommFinalize(communicator_), "ncclCommFinalize");
  const auto until = std::chrono::steady_clock::now() + kPatience;
  while (!settled()) {
    if (std::chrono::steady_clock::now() > until) return abort();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  api_.CommDestroy(std::exchange(communicator_, nullptr));
}

void NcclCommunicator::abort() {
  if (communicator_ == nullptr) return;
  try {
    const Current current(device_->context());
    api_.CommAbort(std::exchange(communicator_, nullptr));
  } catch (const Error&) {
    // The GPU has failed: there is nothing to release.
  }
}

}  // namespace horoplug::cuda
