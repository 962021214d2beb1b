// Streams between threads of one process, so that a test can run many ranks in one address space.
#pragma once

#include <memory>
#include <utility>

#include "transport/doorbell.h"
#include "transport/stream.h"

namespace horoplug {

// Creates a pair of connected streams. A write to one end rings the doorbell of the other end's
// owner. The doorbells are shared, because either rank may end before the other one notices.
std::pair<std::unique_ptr<Stream>, std::unique_ptr<Stream>> make_inproc_pipe(
    std::shared_ptr<Doorbell> first, std::shared_ptr<Doorbell> second);

}  // namespace horoplug
