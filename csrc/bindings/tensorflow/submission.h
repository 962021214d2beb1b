// Calls of the core, for the kernels of TensorFlow and for the custom calls of XLA programs.
#pragma once

#include <cstdint>
#include <span>

#include "../common/engine_slot.h"
#include "handles.h"
#include "kernel.h"

namespace horoplug::tensorflow {

using bindings::engine_slot;
using bindings::EngineSlot;

// The hp_dtype of a TensorFlow data type. Throws Failure if the core does not support it.
std::int32_t data_type(TF_DataType type);

// Throws the Failure that corresponds to a failed call of the core.
void check(hp_status status);

// The failure of an operation outside of init() ... shutdown().
Failure not_initialized();

// Without the splits.
hp_submission submission_of(const Kernel& kernel, std::int32_t dtype,
                            std::span<const hp_tensor> tensors);

// The result of a query. Throws Failure.
std::int64_t query_result(const Kernel& kernel, const EngineSlot::Lease& lease);

}  // namespace horoplug::tensorflow
