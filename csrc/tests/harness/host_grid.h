// Runs the GPU kernels on the host: the same source, block by block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>

namespace horoplug::testing {

// Runs the kernel of this name (see device/cuda/kernels/list.def) on a grid of `blocks` blocks, in
// a random order, by several threads at once; `args` is the struct that the kernel takes. False if
// there is no such kernel.
bool run_on_host(const std::string& kernel, const void* args, std::uint32_t blocks,
                 std::mt19937_64& random, std::size_t threads = 3);

// The size of that struct; 0 if there is no such kernel.
std::size_t args_bytes(const std::string& kernel);

}  // namespace horoplug::testing
