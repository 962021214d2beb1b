// The table of operations, with everything that layers above the algorithms need to know about
// them. The rows are in horoplug/operations.def.
//
// A new operation is one row there, and its algorithms (collectives/registry.cc).
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
  // Several operations can share a batch, in which ranks exchange the row counts of all of them at
  // once.
  bool shares_batch = false;
};

inline constexpr OperationInfo kOperations[] = {
#define HP_OPERATION(code, NAME, Name, public_name, ...) \
  {.kind = OpKind::k##Name, .name = #public_name, __VA_ARGS__},
#include "horoplug/operations.def"
};
// The table is indexed by the code.
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
