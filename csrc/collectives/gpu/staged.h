// What goes from a GPU through the host's memory.
#pragma once

#include <cstddef>

#include "collectives/collective.h"

namespace horoplug {

// A buffer goes there in chunks of so many bytes: ranks meet for every one, which should not cost
// them much beside it.
inline constexpr std::size_t kStagedChunk = 2 << 20;

// Does to a layout of the host's memory what a call asks for on a GPU, by whatever algorithm is
// best for that.
Task run_on_host(Comm& comm, Call call, Layout* layout);

}  // namespace horoplug
