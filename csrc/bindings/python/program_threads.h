// Which threads of a Python program may submit operations, from which the engine tells a deadlock
// from a late thread. The functions are called with the interpreter's lock. They throw
// py::error_already_set, and are therefore called only where the caller may raise an exception
// without losing an operation.
#pragma once

#include <cstdint>
#include <vector>

#include "horoplug/horoplug.h"

namespace horoplug {

// Whether the calling thread was not made by Python's threading module. Such threads belong to
// pools of libraries and submit for another thread, as those do in which PyTorch calls the
// gradients' hooks.
bool is_pool_thread();

// Tells the engine, between two slices of a wait, which threads may submit operations, with or
// without having done so before: those that the interpreter waits for at its end. What libraries
// run beside a program are daemons, or idle threads of a concurrent.futures.ThreadPoolExecutor.
// Also tells it which threads wait for the end of the calling thread.
void expect_threads(hp_engine* engine);

// Tells the engine that the calling thread waits for these operations for the sake of other
// threads, by their identifiers in Python, which seem to wait for it; and what expect_threads()
// tells. A thread that waits in Python's threading module waits for something else.
void note_waits(hp_engine* engine, const std::vector<hp_handle>& handles,
                const std::vector<std::int64_t>& idents);

}  // namespace horoplug
