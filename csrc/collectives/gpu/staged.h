// The path of GPU tensors through the CPU's memory.
#pragma once

#include <cstddef>

#include "collectives/collective.h"

namespace horoplug {

// The chunk size. Ranks synchronise for every chunk, and that cost should be small beside the copy.
inline constexpr std::size_t kStagedChunk = 2 << 20;

// Runs a GPU call on a layout of the CPU's memory, by the cheapest algorithm for CPU tensors.
Task run_on_cpu(Comm& comm, Call call, Layout* layout);

}  // namespace horoplug
