// How the ranks of a process set come to reach each other's GPUs by CUDA IPC.
#pragma once

#include <memory>
#include <string>

#include "collectives/comm.h"
#include "device/cuda/runtime/ipc_peers.h"
#include "device/cuda/runtime/workspace.h"

namespace horoplug {

// Collective. Either all ranks have `peers` afterwards, or none has, and `problem` says why in one
// line, the same on all of them.
Task connect_ipc(Comm& comm, cuda::Workspace& workspace, std::unique_ptr<cuda::IpcPeers>& peers,
                 std::string& problem);

}  // namespace horoplug
