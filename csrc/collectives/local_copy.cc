// Every collective on a process set of one rank: the input, scaled, is the result.
#include <cstring>

#include "collectives/collective.h"
#include "collectives/partition.h"

namespace horoplug {
namespace {

// Small enough to stay in the cache between the passes.
constexpr std::size_t kChunk = 256 * 1024;

void copy_layout(Comm& comm, Call& call) {
  Layout& layout = *call.layout;
  const std::size_t grain = call.grain();
  std::byte* target = call.output != nullptr ? call.output : layout.contiguous_output();
  for (std::size_t i = 0; i < chunk_count(layout.bytes(), kChunk); ++i) {
    const Part chunk = chunk_of({0, layout.bytes()}, i, kChunk);
    std::byte* place =
        target != nullptr ? target + chunk.begin : comm.scratch(Scratch::kWork, chunk.bytes);
    layout.pack(chunk.begin, chunk.bytes, place);
    if (call.reduce != nullptr && !call.finish.is_identity()) {
      const void* const source = place;
      call.reduce(place, &source, 1, chunk.bytes / grain, call.finish);
    }
    if (target == nullptr) layout.unpack(chunk.begin, chunk.bytes, place);
  }
}

}  // namespace

Task local_copy(Comm& comm, Call& call) {
  if (call.layout != nullptr) {
    copy_layout(comm, call);
  } else if (call.input != nullptr && call.output != nullptr) {
    std::memmove(call.output, call.input, call.receive_bytes[0]);
  }
  co_return;
}

}  // namespace horoplug
