#include "harness/ranks.h"

#include "base/host_grid.h"
#include "transport/inproc/pipe.h"

namespace horoplug::testing {

Ranks::Ranks(std::size_t ranks, std::size_t hosts, const Wrap& wrap) {
  constexpr int kLanes = 2;
  std::vector<std::vector<std::vector<std::unique_ptr<Stream>>>> lanes(ranks);
  std::vector<std::shared_ptr<Doorbell>> bells;
  std::vector<Arena> arenas;
  std::vector<int> host_of;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    lanes[rank].resize(ranks);
    bells.push_back(std::make_shared<Doorbell>());
    host_of.push_back(static_cast<int>(rank % hosts));
  }
  const auto add = [&](std::unique_ptr<Stream> stream, std::size_t from, std::size_t to) {
    if (wrap) stream = wrap(std::move(stream), from, to);
    lanes[from][to].push_back(std::move(stream));
  };
  for (std::size_t a = 0; a < ranks; ++a) {
    for (std::size_t b = a + 1; b < ranks; ++b) {
      for (int lane = 0; lane < kLanes; ++lane) {
        auto pair = make_inproc_pipe(bells[a], bells[b]);
        add(std::move(pair.first), a, b);
        add(std::move(pair.second), b, a);
      }
    }
  }
  const HostGrid grid(host_of);
  const bool shares = grid.most() > 1;
  for (std::size_t rank = 0; shares && rank < ranks; ++rank) {
    arenas.emplace_back(Segment::allocate(Arena::kSegmentBytes));
  }
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    const int me = static_cast<int>(rank);
    meshes_.push_back(
        std::make_unique<Mesh>(std::move(lanes[rank]), bells[rank], [](int, const Bytes&) {}));
    memories_.emplace_back();
    if (grid.host_ranks(me).size() > 1) {
      std::vector<Arena> of_host;
      std::vector<std::shared_ptr<Doorbell>> bells_of_host;
      for (const int other : grid.host_ranks(me)) {
        of_host.push_back(arenas[static_cast<std::size_t>(other)]);
        bells_of_host.push_back(bells[static_cast<std::size_t>(other)]);
      }
      memories_.back() = std::make_unique<HostMemory>(
          grid.local_rank(me), std::move(of_host), std::move(bells_of_host), grid.host_ranks(me));
    }
    std::vector<std::vector<Link*>> links;
    for (std::size_t peer = 0; peer < ranks; ++peer) {
      links.push_back(meshes_.back()->lanes(static_cast<int>(peer)));
    }
    HostMemory* const memory = memories_.back().get();
    comms_.push_back(
        std::make_unique<Comm>(me, std::move(links), grid.hosts() == 1 ? memory : nullptr));
    comms_.back()->set_hosts(grid, memory, true);
  }
}

std::uint64_t Ranks::bytes_moved() const {
  std::uint64_t sum = 0;
  for (const auto& mesh : meshes_) sum += mesh->bytes_moved();
  return sum;
}

}  // namespace horoplug::testing
