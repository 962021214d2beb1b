// The part of NCCL that horoplug uses; see driver.h for how and why.
#pragma once

#include <cstddef>
#include <string>

#include "device/cuda/driver/driver.h"

// NOLINTBEGIN(readability-identifier-naming,bugprone-macro-parentheses): the names are NCCL's.
struct ncclComm;
using ncclComm_t = ncclComm*;
struct ncclUniqueId {
  char internal[128];
};
using ncclResult_t = int;  // enums of C
using ncclDataType_t = int;
using ncclRedOp_t = int;

namespace horoplug::cuda {

inline constexpr ncclResult_t kNcclSuccess = 0;
inline constexpr ncclResult_t kNcclInProgress = 7;

// ncclConfig_t as of 2.18. NCCL accepts configurations of older versions: the size tells the
// version, and missing fields have defaults.
struct NcclConfig {
  static constexpr int kUndefined = -2147483647 - 1;  // INT_MIN
  std::size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 21800;
  int blocking = kUndefined;
  int cga_cluster_size = kUndefined;
  int min_ctas = kUndefined;
  int max_ctas = kUndefined;
  const char* net_name = nullptr;
  int split_share = kUndefined;
};

// The first version with ncclCommSplit; PyTorch 2.1 already contains it.
inline constexpr int kOldestNccl = 21800;

// Name and parameters of each function that returns an ncclResult_t. cudaStream_t is CUstream.
// clang-format off
#define HOROPLUG_NCCL_FUNCTIONS(X)                                                                 \
  X(GetVersion, (int* version))                                                                    \
  X(GetUniqueId, (ncclUniqueId*))                                                                  \
  X(CommInitRankConfig, (ncclComm_t*, int ranks, ncclUniqueId, int rank, NcclConfig*))             \
  X(CommSplit, (ncclComm_t, int color, int key, ncclComm_t*, NcclConfig*))                         \
  X(CommFinalize, (ncclComm_t))                                                                    \
  X(CommDestroy, (ncclComm_t))                                                                     \
  X(CommAbort, (ncclComm_t))                                                                       \
  X(CommGetAsyncError, (ncclComm_t, ncclResult_t*))                                                \
  X(AllReduce, (const void* send, void* receive, std::size_t count, ncclDataType_t, ncclRedOp_t,   \
                ncclComm_t, CUstream))                                                             \
  X(ReduceScatter, (const void* send, void* receive, std::size_t receive_count, ncclDataType_t,    \
                    ncclRedOp_t, ncclComm_t, CUstream))                                            \
  X(Reduce, (const void* send, void* receive, std::size_t count, ncclDataType_t, ncclRedOp_t,      \
             int root, ncclComm_t, CUstream))                                                      \
  X(AllGather, (const void* send, void* receive, std::size_t send_count, ncclDataType_t,           \
                ncclComm_t, CUstream))                                                             \
  X(Broadcast, (const void* send, void* receive, std::size_t count, ncclDataType_t, int root,      \
                ncclComm_t, CUstream))                                                             \
  X(Send, (const void* data, std::size_t count, ncclDataType_t, int peer, ncclComm_t, CUstream))   \
  X(Recv, (void* data, std::size_t count, ncclDataType_t, int peer, ncclComm_t, CUstream))         \
  X(GroupStart, ())                                                                                \
  X(GroupEnd, ())
#define HOROPLUG_NCCL_TEXTS(X)                                                                     \
  X(GetErrorString, (ncclResult_t))                                                                \
  X(GetLastError, (ncclComm_t))
// clang-format on

// One pointer for each function, under its name without "nccl".
struct NcclApi {
#define HOROPLUG_NCCL_MEMBER(name, parameters) ncclResult_t(*name) parameters = nullptr;
#define HOROPLUG_NCCL_TEXT(name, parameters) const char*(*name)parameters = nullptr;
  HOROPLUG_NCCL_FUNCTIONS(HOROPLUG_NCCL_MEMBER)
  HOROPLUG_NCCL_TEXTS(HOROPLUG_NCCL_TEXT)
#undef HOROPLUG_NCCL_MEMBER
#undef HOROPLUG_NCCL_TEXT
};
// NOLINTEND(readability-identifier-naming,bugprone-macro-parentheses)

// Version 22304 is 2.23.4.
using Nccl = Opened<NcclApi>;

Nccl open_nccl(const LibraryPaths& places = {});

std::string nccl_version(int number);

}  // namespace horoplug::cuda
