// The communicators of all ranks of a process set, on one thread, over in-memory streams: a test
// decides which rank runs, and when bytes move.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "collectives/comm.h"
#include "transport/mesh.h"

namespace horoplug::testing {

class Ranks {
 public:
  // Rank r is on host r % hosts. The ranks of a host share memory.
  // `wrap`, if set, replaces the streams; it is called with a stream's two ranks.
  using Wrap = std::function<std::unique_ptr<Stream>(std::unique_ptr<Stream>, std::size_t from,
                                                     std::size_t to)>;
  Ranks(std::size_t ranks, std::size_t hosts, const Wrap& wrap = nullptr);

  std::size_t size() const { return comms_.size(); }
  Comm& comm(std::size_t rank) { return *comms_[rank]; }
  Mesh& mesh(std::size_t rank) { return *meshes_[rank]; }
  void pump() {
    for (auto& mesh : meshes_) mesh->pump();
  }
  // Of all links so far.
  std::uint64_t bytes_moved() const;

 private:
  std::vector<std::unique_ptr<Mesh>> meshes_;
  std::vector<std::unique_ptr<HostMemory>> memories_;
  std::vector<std::unique_ptr<Comm>> comms_;
};

}  // namespace horoplug::testing
