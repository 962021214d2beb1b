// Compares the GPU kernels, run by the launcher, with the CPU kernels. The GPU can be a simulated
// one, which shows that the checks themselves are right.
#pragma once

#include <random>

#include "device/cuda/runtime/launcher.h"

namespace horoplug::testing {

// Each runs random batches of every dtype that the kernels support on one GPU, and reports
// differences as failed checks of the calling test.
void check_moves(const cuda::Context& context, cuda::Launcher& launcher, std::mt19937_64& random);
void check_reductions(const cuda::Context& context, cuda::Launcher& launcher,
                      std::mt19937_64& random);
void check_adasum(const cuda::Context& context, cuda::Launcher& launcher, std::mt19937_64& random);

}  // namespace horoplug::testing
