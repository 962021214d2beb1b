// Runs the GPU kernels on the host, from the same source, one block after another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>

namespace horoplug::testing {

// Runs the kernel of this name (see device/cuda/kernels/list.def) on a grid of `blocks` blocks in
// random order, distributed over `threads` threads. `args` points to the kernel's argument struct.
// Returns false if the kernel does not exist.
bool run_on_cpu(const std::string& kernel, const void* args, std::uint32_t blocks,
                std::mt19937_64& random, std::size_t threads = 3);

// The size of the kernel's argument struct; 0 if the kernel does not exist.
std::size_t args_bytes(const std::string& kernel);

}  // namespace horoplug::testing
