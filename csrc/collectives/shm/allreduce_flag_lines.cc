// Allreduce of a small buffer in shared memory: every rank writes its input beside its flag and
// reduces all inputs for itself. More arithmetic than by parts, but the ranks meet only once.
//
// All ranks combine the operands in rank order: all get the same bits.
#include "collectives/collective.h"

namespace horoplug {

Task allreduce_lines(Comm& comm, Call& call) {
  SharedGroup& group = *comm.host_memory();
  Layout& layout = *call.layout;
  const std::uint64_t meeting = group.next_meeting();
  layout.pack(0, layout.bytes(), group.line(group.rank(), meeting));
  group.show(meeting);
  co_await group.met(meeting);

  const auto operands = group.operands();
  for (int rank = 0; rank < group.size(); ++rank) {
    operands[static_cast<std::size_t>(rank)] = group.line(rank, meeting);
  }
  std::byte* result = layout.contiguous_output();
  if (result == nullptr) result = comm.scratch(Scratch::kWork, layout.bytes());
  call.reduce(result, operands.data(), group.size(), layout.elements(), call.finish);
  layout.unpack(0, layout.bytes(), result);
}

}  // namespace horoplug
