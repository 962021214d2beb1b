// The table of operations: one row for each, with everything that layers above the algorithms need
// to know about it.
//
// A new operation is a code in `hp_op`, an enumerator of OpKind, one row here, and its algorithms
// (collectives/registry.cc). The table is indexed by the code, so rows follow the order of the
// codes.
#pragma once

#include <iterator>

#include "base/types.h"

namespace horoplug {

enum class OpCategory : std::uint8_t {
  kCollective,      // all ranks of the process set take part
  kPointToPoint,    // two ranks take part, without negotiation: see point_to_point_matcher.h
  kAdministrative,  // changes a process set or the job, and moves no data; has a function of its
                    // own
};

enum class OpOutput : std::uint8_t {
  kNone,
  kSubmitted,  // the submission's output, of the input's size
  kAllocated,  // memory that the engine allocates: its size depends on the other ranks
  kEither,     // the submission's output, or memory that the engine allocates if there is none
};

struct OperationInfo {
  OpKind kind;
  const char* name;  // public name; begins the names of operations that have none of their own
  OpCategory category = OpCategory::kCollective;
  OpOutput output = OpOutput::kNone;
  bool has_tensors = true;
  bool has_root = false;     // Signature::root counts: the root, or the peer
  bool reduces = false;      // Signature::reduce counts
  bool rows_differ = false;  // the first dimension may differ between ranks
  bool needs_rows = false;   // tensors need a first dimension
  bool takes_splits = false;
  bool fuses = false;  // several operations can share a batch, as one buffer
};

inline constexpr OperationInfo kOperations[] = {
    {.kind = OpKind::kAllreduce,
     .name = "allreduce",
     .output = OpOutput::kSubmitted,
     .reduces = true,
     .fuses = true},
    {.kind = OpKind::kAllgather,
     .name = "allgather",
     .output = OpOutput::kAllocated,
     .rows_differ = true},
    {.kind = OpKind::kBroadcast,
     .name = "broadcast",
     .output = OpOutput::kSubmitted,
     .has_root = true,
     .fuses = true},
    {.kind = OpKind::kAlltoall,
     .name = "alltoall",
     .output = OpOutput::kAllocated,
     .rows_differ = true,
     .takes_splits = true},
    {.kind = OpKind::kReducescatter,
     .name = "reducescatter",
     .output = OpOutput::kEither,
     .reduces = true,
     .needs_rows = true},
    {.kind = OpKind::kBarrier, .name = "barrier", .has_tensors = false},
    {.kind = OpKind::kJoin,
     .name = "join",
     .category = OpCategory::kAdministrative,
     .has_tensors = false},
    {.kind = OpKind::kAddSet,
     .name = "add_process_set",
     .category = OpCategory::kAdministrative,
     .has_tensors = false},
    {.kind = OpKind::kRemoveSet,
     .name = "remove_process_set",
     .category = OpCategory::kAdministrative,
     .has_tensors = false},
    {.kind = OpKind::kAddBuffer,
     .name = "create_buffer",
     .category = OpCategory::kAdministrative,
     .has_tensors = false},
    {.kind = OpKind::kReduce,
     .name = "reduce",
     .output = OpOutput::kSubmitted,
     .has_root = true,
     .reduces = true,
     .fuses = true},
    {.kind = OpKind::kGather,
     .name = "gather",
     .output = OpOutput::kAllocated,
     .has_root = true,
     .rows_differ = true},
    {.kind = OpKind::kScatter,
     .name = "scatter",
     .output = OpOutput::kAllocated,
     .has_root = true,
     .rows_differ = true,
     .needs_rows = true,
     .takes_splits = true},
    {.kind = OpKind::kSend,
     .name = "send",
     .category = OpCategory::kPointToPoint,
     .has_root = true},
    {.kind = OpKind::kReceive,
     .name = "recv",
     .category = OpCategory::kPointToPoint,
     .output = OpOutput::kSubmitted,
     .has_root = true},
};
static_assert(std::size(kOperations) == kOpKindCount);
static_assert([] {
  for (int code = 0; code < kOpKindCount; ++code) {
    if (static_cast<int>(kOperations[code].kind) != code) return false;
  }
  return true;
}());

constexpr const OperationInfo& operation_info(OpKind kind) {
  return kOperations[static_cast<std::size_t>(kind)];
}

// Values may come off the wire, so that one outside the enumeration has a name as well.
constexpr const char* op_kind_name(OpKind kind) {
  const auto code = static_cast<std::size_t>(kind);
  return code < std::size(kOperations) ? kOperations[code].name : "unknown operation";
}

constexpr bool reduces(OpKind kind) { return operation_info(kind).reduces; }
constexpr bool is_point_to_point(OpKind kind) {
  return operation_info(kind).category == OpCategory::kPointToPoint;
}
constexpr bool is_administrative(OpKind kind) {
  return operation_info(kind).category == OpCategory::kAdministrative;
}

}  // namespace horoplug
