// What a call of the core takes, whoever makes it: a kernel of TensorFlow's or a program of XLA's.
#pragma once

#include <cstdint>
#include <span>

#include "../common/job.h"
#include "handles.h"
#include "kernel.h"

namespace horoplug::tensorflow {

using bindings::Job;
using bindings::job;

// The core's number of a data type. Throws Failure if it has none.
std::int32_t data_type(TF_DataType type);

// Throws what a failed call of the core is in TensorFlow.
void check(hp_status status);

// That there is no engine.
Failure not_initialized();

hp_submission describe(const Kernel& kernel, std::int32_t dtype,
                       std::span<const hp_tensor> tensors);

// The number that a query asks for. Throws Failure.
std::int64_t look_up(const Kernel& kernel, const Job::Loan& job);

}  // namespace horoplug::tensorflow
