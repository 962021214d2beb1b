// Every operation on GPU tensors in a process set of one rank: the result is the scaled input.
#include <vector>

#include "collectives/gpu/gpu_group.h"
#include "collectives/gpu/pack.h"
#include "device/cuda/runtime/batch.h"

namespace horoplug {

Task gpu_copy(Comm& comm, Call& call) {
  cuda::Workspace& workspace = comm.gpu()->workspace();
  if (call.layout == nullptr) {
    workspace.copy(gpu_address(call.output), gpu_address(call.input), call.receive_bytes[0]);
    co_return;
  }
  const GpuBuffer buffer(workspace, call);
  if (call.kind == OpKind::kBroadcast) {
    pass_on_gpu(workspace, call);
  } else if (call.output == nullptr) {
    // Without packing, the input itself is finished.
    buffer.pack();
    if (buffer.from() != buffer.to()) {
      workspace.copy(buffer.to(), buffer.from(), buffer.bytes());
    }
    buffer.unpack(call.finish);
  } else {
    buffer.pack();
    const std::vector<cuda::Transfer> all = {
        {buffer.from(), gpu_address(call.output), buffer.elements()}};
    workspace.launcher().move(call.dtype, call.dtype, call.finish, all);
  }
}

}  // namespace horoplug
