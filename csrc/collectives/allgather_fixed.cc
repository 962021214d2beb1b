#include "collectives/allgather_fixed.h"

#include "collectives/collective.h"

namespace horoplug {

Task barrier(Comm& comm) {
  Call call;
  co_await choose_algorithm(comm, call, nullptr).run(comm, call);
}

Task allgather_fixed_bytes(Comm& comm, const void* mine, std::size_t bytes, void* all) {
  const std::vector<std::size_t> sizes(static_cast<std::size_t>(comm.size()), bytes);
  Call call;
  call.kind = OpKind::kAllgather;
  call.input = static_cast<const std::byte*>(mine);
  call.output = static_cast<std::byte*>(all);
  call.receive_bytes = sizes;
  const Algorithm& chosen = choose_algorithm(comm, call, nullptr);
  if (comm.planned() && !chosen.defers_writes) co_await barrier(comm);
  Comm::Queued queued(comm);
  co_await chosen.run(comm, call);
  queued.have_left();
  comm.commit();
}

}  // namespace horoplug
