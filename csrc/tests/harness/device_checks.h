// The GPU kernels through the launcher against the CPU's kernels: on a GPU, or on a simulated one,
// which shows that the checks themselves are right.
#pragma once

#include <random>

#include "device/cuda/runtime/launcher.h"

namespace horoplug::testing {

// Random batches of every dtype; fails the doctest that calls it. All within what one GPU can
// reach.
void check_moves(const cuda::Context& context, cuda::Launcher& launcher, std::mt19937_64& random);
void check_reductions(const cuda::Context& context, cuda::Launcher& launcher,
                      std::mt19937_64& random);
void check_adasum(const cuda::Context& context, cuda::Launcher& launcher, std::mt19937_64& random);

}  // namespace horoplug::testing
