// How the ranks of a process set map each other's GPU memory by CUDA IPC.
#pragma once

#include <memory>
#include <string>

#include "collectives/comm.h"
#include "device/cuda/runtime/ipc_peers.h"
#include "device/cuda/runtime/workspace.h"

namespace horoplug {

// Collective. Afterwards either all ranks have `peers`, or none has, and `problem` gives the reason
// in one line that is equal on all ranks.
Task connect_ipc(Comm& comm, cuda::Workspace& workspace, std::unique_ptr<cuda::IpcPeers>& peers,
                 std::string& problem);

}  // namespace horoplug
