// What the hierarchical algorithms and their costs share.
//
// Ranks with the same local rank, one per host, exchange a slice of the data between the hosts.
// There are as many slices as the host with the fewest ranks has. Of the parts of all ranks, slice
// s holds those of the local ranks s, s + slices, s + 2 * slices, … of all hosts, host by host.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "base/host_grid.h"
#include "collectives/collective.h"
#include "collectives/partition.h"
#include "transport/shm/arena.h"

namespace horoplug {

// The bytes of an allreduce that are reduced at once between the hosts, while others are moved in
// the memory of the hosts: large enough that each slice makes good use of the network.
inline std::size_t hierarchical_block(const HostGrid& hosts) {
  constexpr std::size_t kSlice = 4 * Arena::kSlotBytes;
  return static_cast<std::size_t>(hosts.fewest()) * kSlice;
}

// The parts of one slice, one after the other.
class PartsOfSlice {
 public:
  struct Piece {
    int rank;
    Part in_buffer;     // in the buffer of all parts, in rank order
    std::size_t begin;  // in the slice
  };

  // `parts`: of all ranks.
  PartsOfSlice(const HostGrid& hosts, std::span<const Part> parts, int slice) {
    for (const auto& of_host : hosts.members()) {
      const std::size_t before = bytes_;
      for (auto i = static_cast<std::size_t>(slice); i < of_host.size();
           i += static_cast<std::size_t>(hosts.fewest())) {
        const Part& part = parts[static_cast<std::size_t>(of_host[i])];
        pieces_.push_back({of_host[i], part, bytes_});
        bytes_ += part.bytes;
      }
      of_host_.push_back(bytes_ - before);
    }
  }

  std::size_t bytes() const { return bytes_; }
  std::span<const std::size_t> bytes_by_host() const { return of_host_; }
  std::span<const Piece> pieces() const { return pieces_; }

  // Calls use(in_buffer, at, bytes) for each piece of the range [begin, begin + bytes) of the
  // slice; `at` counts from the begin of the range.
  template <typename Use>
  void for_each(const Part& range, Use&& use) const {
    const std::size_t end = range.begin + range.bytes;
    for (const Piece& piece : pieces_) {
      const std::size_t from = std::max(range.begin, piece.begin);
      const std::size_t to = std::min(end, piece.begin + piece.in_buffer.bytes);
      if (from < to) use(piece.in_buffer.begin + from - piece.begin, from - range.begin, to - from);
    }
  }

 private:
  std::vector<Piece> pieces_;
  std::vector<std::size_t> of_host_;
  std::size_t bytes_ = 0;
};

// An allgather or reducescatter, with the parts of all ranks in slices.
struct SlicedCall {
  SlicedCall(Comm& on, const Call& its)
      : comm(on),
        call(its),
        parts(consecutive(its.receive_bytes)),
        local_rank(on.hosts()->local_rank(on.rank())),
        holder(local_rank % on.hosts()->fewest()) {
    const HostGrid& hosts = *on.hosts();
    for (int slice = 0; slice < hosts.fewest(); ++slice) slices.emplace_back(hosts, parts, slice);
  }

  const Part& part_of(int rank) const { return parts[static_cast<std::size_t>(rank)]; }
  const Part& own() const { return part_of(comm.rank()); }
  int slice_count() const { return static_cast<int>(slices.size()); }
  // Whether this rank exchanges a slice with other hosts, which is then own_slice().
  bool has_slice() const { return local_rank == holder; }
  const PartsOfSlice& own_slice() const { return slices[static_cast<std::size_t>(local_rank)]; }
  // The bytes of this rank's slice that belong to the ranks of its host.
  std::size_t own_bytes_of_host() const {
    return own_slice().bytes_by_host()[static_cast<std::size_t>(comm.hosts()->host(comm.rank()))];
  }
  // The ranks of this host, by local rank.
  const std::vector<int>& host_ranks() const { return comm.hosts()->host_ranks(comm.rank()); }

  Comm& comm;
  const Call& call;
  const std::vector<Part> parts;
  const int local_rank;
  // The local rank that exchanges the slice with this rank's own part with other hosts.
  const int holder;
  std::vector<PartsOfSlice> slices;
};

}  // namespace horoplug
