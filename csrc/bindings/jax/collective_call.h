// One operation of a compiled program, from XLA's buffers to the core and back.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../common/engine_slot.h"
#include "eager_calls.h"
#include "ffi_frame.h"
#include "gpu_stream.h"

namespace horoplug::jax {

class CollectiveCall {
 public:
  // Throws Failure.
  explicit CollectiveCall(const xla::CallFrame& frame);

  // Runs the operation on this thread. On a GPU it returns when the operation has been enqueued in
  // XLA's stream. Throws Failure.
  void perform();

 private:
  void check_position() const;
  void* output_of(std::size_t index) const;
  hp_submission submission();
  void finish();
  void copy_result(const CompletedOperation& operation, std::size_t index);
  void keep(CompletedOperation operation);
  std::string subject() const;
  // Whether the number of output rows depends on the other ranks.
  bool rows_unknown() const { return op_ == HP_ALLGATHER || op_ == HP_ALLTOALL; }
  bool is_on_gpu() const { return gpu_.device >= 0; }

  const Attributes attributes_;
  const std::int32_t eager_call_;  // number of the eager call; 0: the call of a compiled program
  bindings::EngineSlot::Lease lease_;
  const std::int32_t op_;
  const std::int32_t process_set_;
  std::string name_;
  std::vector<std::int64_t> splits_;
  const bool equal_rows_;  // every rank must contribute the same number of rows
  std::vector<Tensor> inputs_;
  std::vector<Tensor> outputs_;
  GpuStream gpu_;
  std::vector<hp_tensor> described_;
  hp_handle handle_ = 0;
};

}  // namespace horoplug::jax
