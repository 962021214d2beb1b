// Builds what one rank needs to negotiate and run the operations of a process set.
#pragma once

#include <memory>
#include <vector>

#include "engine/execution/process_set.h"
#include "engine/options.h"
#include "transport/mesh.h"

namespace horoplug {

// `segments`: the shared memory of those members that are on this rank's host, or none.
std::unique_ptr<ProcessSet> make_process_set(const EngineConfig& config, Mesh& mesh,
                                             const MembersPtr& members,
                                             std::vector<Segment> segments);

}  // namespace horoplug
