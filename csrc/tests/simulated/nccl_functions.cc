// NCCL's functions, and the table of them.
#include "tests/simulated/nccl_functions.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace horoplug::testing::simulated {

using namespace horoplug::cuda;

namespace {

NcclMachine& nccl_machine() { return NcclMachine::get(); }

// Whether the configuration asks for a blocking communicator.
bool is_blocking(const NcclConfig* config, bool default_value) {
  if (config == nullptr || config->blocking == NcclConfig::kUndefined) return default_value;
  return config->blocking != 0;
}

Operation operation(Kind kind, const void* send, void* receive, std::size_t count, int dtype,
                    int op, int root) {
  Operation made;
  made.what.kind = kind;
  made.what.dtype = dtype;
  made.what.op = op;
  made.what.root = root;
  made.what.count = count;
  made.send = send;
  made.receive = receive;
  return made;
}

// NCCL frees the communicator's GPU memory, for which CUDA waits until the GPU is idle.
ncclResult_t wait_for_device(const char* call, const Communicator& communicator) {
  const bool done = nccl_machine().shared->gpu.wait(call, communicator.device) == kSuccess;
  return done ? kNcclSuccess : kUnhandledCudaError;
}

// The returned text is valid until the next call on the same thread.
const char* keep(std::string text) {
  thread_local std::string kept;
  kept = std::move(text);
  return kept.c_str();
}

}  // namespace

ncclResult_t NcclFunctions::GetVersion(int* version) {
  *version = nccl_machine().options.version;
  return kNcclSuccess;
}

ncclResult_t NcclFunctions::GetUniqueId(ncclUniqueId* id) {
  *id = {};
  const std::string name = nccl_machine().new_name();
  std::copy_n(name.c_str(), std::min(name.size(), sizeof id->internal - 1), id->internal);
  return kNcclSuccess;
}

ncclResult_t NcclFunctions::CommInitRankConfig(ncclComm_t* made, int ranks, ncclUniqueId id,
                                               int rank, NcclConfig* config) {
  id.internal[sizeof id.internal - 1] = '\0';
  const bool known = std::strncmp(id.internal, "nccl-", 5) == 0;
  if (!known || ranks < 1 || ranks > kMaxRanks || rank < 0 || rank >= ranks) {
    return kInvalidArgument;
  }
  if (config != nullptr && (config->magic != 0xcafebeef || config->size < sizeof *config)) {
    return kInvalidArgument;
  }
  if (const char* text = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
      text != nullptr && std::strcmp(text, "1") == 0) {
    nccl_machine().shared->multi_rank = true;
  }
  // NCCL allocates memory and loads kernels here, for which CUDA waits until the GPU is idle.
  const GpuInterface& gpu = nccl_machine().shared->gpu;
  if (gpu.wait("ncclCommInitRankConfig", gpu.current_device()) != kSuccess) {
    return kUnhandledCudaError;
  }
  auto communicator = std::make_shared<Communicator>(nccl_machine().shared, id.internal, rank,
                                                     ranks, is_blocking(config, true));
  const ncclResult_t result = communicator->init();
  if (result != kNcclSuccess && result != kNcclInProgress) {
    nccl_machine().set_last_error(communicator->last_error());
    return result;
  }
  *made = nccl_machine().add(std::move(communicator));
  return result;
}

ncclResult_t NcclFunctions::CommSplit(ncclComm_t handle, int color, int key, ncclComm_t* made,
                                      NcclConfig* config) {
  *made = nullptr;
  const std::shared_ptr<Communicator> parent = nccl_machine().find(handle);
  if (parent == nullptr) return kInvalidArgument;
  if (parent->state() != kNcclSuccess) return parent->not_ready();
  const std::shared_ptr<Communicator> part =
      parent->split(color, key, is_blocking(config, parent->blocking));
  if (part == nullptr) return kNcclSuccess;
  const ncclResult_t result = part->init_split();
  if (result == kNcclSuccess || result == kNcclInProgress) *made = nccl_machine().add(part);
  return result;
}

ncclResult_t NcclFunctions::CommFinalize(ncclComm_t handle) {
  const std::shared_ptr<Communicator> communicator = nccl_machine().find(handle);
  if (communicator == nullptr) return kInvalidArgument;
  if (communicator->state() != kNcclSuccess) return communicator->not_ready();
  return communicator->finalize();
}

ncclResult_t NcclFunctions::CommDestroy(ncclComm_t handle) {
  const std::shared_ptr<Communicator> communicator = nccl_machine().remove(handle);
  if (communicator == nullptr) return kInvalidArgument;
  // As in NCCL, a rank that has not finalized waits for all ranks here.
  communicator->join();
  if (!communicator->is_finalized()) communicator->finalize();
  communicator->join();
  return wait_for_device("ncclCommDestroy", *communicator);
}

ncclResult_t NcclFunctions::CommAbort(ncclComm_t handle) {
  const std::shared_ptr<Communicator> communicator = nccl_machine().remove(handle);
  if (communicator == nullptr) return kInvalidArgument;
  communicator->abort();
  return wait_for_device("ncclCommAbort", *communicator);
}

ncclResult_t NcclFunctions::CommGetAsyncError(ncclComm_t handle, ncclResult_t* error) {
  const std::shared_ptr<Communicator> communicator = nccl_machine().find(handle);
  if (communicator == nullptr) return kInvalidArgument;
  *error = communicator->state();
  return kNcclSuccess;
}

ncclResult_t NcclFunctions::AllReduce(const void* send, void* receive, std::size_t count,
                                      ncclDataType_t dtype, ncclRedOp_t op, ncclComm_t comm,
                                      CUstream stream) {
  return nccl_machine().enqueue(
      comm, operation(Kind::kAllReduce, send, receive, count, dtype, op, 0), stream);
}

ncclResult_t NcclFunctions::ReduceScatter(const void* send, void* receive, std::size_t count,
                                          ncclDataType_t dtype, ncclRedOp_t op, ncclComm_t comm,
                                          CUstream stream) {
  return nccl_machine().enqueue(
      comm, operation(Kind::kReduceScatter, send, receive, count, dtype, op, 0), stream);
}

ncclResult_t NcclFunctions::Reduce(const void* send, void* receive, std::size_t count,
                                   ncclDataType_t dtype, ncclRedOp_t op, int root, ncclComm_t comm,
                                   CUstream stream) {
  return nccl_machine().enqueue(
      comm, operation(Kind::kReduce, send, receive, count, dtype, op, root), stream);
}

ncclResult_t NcclFunctions::AllGather(const void* send, void* receive, std::size_t count,
                                      ncclDataType_t dtype, ncclComm_t comm, CUstream stream) {
  return nccl_machine().enqueue(
      comm, operation(Kind::kAllGather, send, receive, count, dtype, 0, 0), stream);
}

ncclResult_t NcclFunctions::Broadcast(const void* send, void* receive, std::size_t count,
                                      ncclDataType_t dtype, int root, ncclComm_t comm,
                                      CUstream stream) {
  return nccl_machine().enqueue(
      comm, operation(Kind::kBroadcast, send, receive, count, dtype, 0, root), stream);
}

ncclResult_t NcclFunctions::Send(const void* data, std::size_t count, ncclDataType_t dtype,
                                 int peer, ncclComm_t comm, CUstream stream) {
  return nccl_machine().enqueue(comm, operation(Kind::kSend, data, nullptr, count, dtype, 0, peer),
                                stream);
}

ncclResult_t NcclFunctions::Recv(void* data, std::size_t count, ncclDataType_t dtype, int peer,
                                 ncclComm_t comm, CUstream stream) {
  return nccl_machine().enqueue(comm, operation(Kind::kRecv, nullptr, data, count, dtype, 0, peer),
                                stream);
}

ncclResult_t NcclFunctions::GroupStart() { return nccl_machine().start_group(); }
ncclResult_t NcclFunctions::GroupEnd() { return nccl_machine().end_group(); }

const char* NcclFunctions::GetErrorString(ncclResult_t result) {
  constexpr const char* kTexts[] = {"no error",
                                    "unhandled cuda error",
                                    "unhandled system error",
                                    "internal error",
                                    "invalid argument",
                                    "invalid usage",
                                    "remote process exited or there was a network error",
                                    "NCCL operation in progress"};
  const bool known = result >= 0 && result < static_cast<int>(std::size(kTexts));
  return known ? kTexts[result] : "unknown result code";
}

const char* NcclFunctions::GetLastError(ncclComm_t handle) {
  if (handle == nullptr) return keep(nccl_machine().last_error());
  const std::shared_ptr<Communicator> communicator = nccl_machine().find(handle);
  return keep(communicator != nullptr ? communicator->last_error() : "");
}

void fill(NcclApi& api) {
#define SIMULATED_FUNCTION(name, parameters) \
  api.name = NcclCheckedFunction<"nccl" #name, &NcclFunctions::name>::call;
#define SIMULATED_TEXT(name, parameters) api.name = NcclFunctions::name;
  HOROPLUG_NCCL_FUNCTIONS(SIMULATED_FUNCTION)
  HOROPLUG_NCCL_TEXTS(SIMULATED_TEXT)
#undef SIMULATED_FUNCTION
#undef SIMULATED_TEXT
}

}  // namespace horoplug::testing::simulated
