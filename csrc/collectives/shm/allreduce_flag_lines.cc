// Allreduce of a small buffer in shared memory: every rank writes its input beside its flag and
// reduces all inputs for itself. This takes more arithmetic than
// reducing by parts, but only one synchronisation.
//
// All ranks combine the operands in rank order: all get the same bits.
#include "collectives/collective.h"

namespace horoplug {

Task allreduce_lines(Comm& comm, Call& call) {
  HostMemory& memory = *comm.host_memory();
  Layout& layout = *call.layout;
  const std::uint64_t exchange = memory.next_exchange();
  layout.pack(0, layout.bytes(), memory.line(memory.rank(), exchange));
  memory.publish_line(exchange);
  co_await memory.exchanged(exchange);

  const auto operands = memory.operands();
  for (int rank = 0; rank < memory.size(); ++rank) {
    operands[static_cast<std::size_t>(rank)] = memory.line(rank, exchange);
  }
  std::byte* result = layout.contiguous_output();
  if (result == nullptr) result = comm.scratch(Scratch::kWork, layout.bytes());
  call.reduce(result, operands.data(), memory.size(), layout.bytes() / call.grain(), call.finish);
  layout.unpack(0, layout.bytes(), result);
}

}  // namespace horoplug
