// Which algorithm is chosen for a call, from the costs alone.
#include <doctest/doctest.h>

#include <string>

#include "collectives/collective.h"

using namespace horoplug;

namespace {

Costs slow_network() {
  Costs costs;
  costs.stream = {100, 0.001};
  return costs;
}

// The choice for `bytes` bytes in parts of equal size. The ranks of a host do not share memory.
std::string chosen(OpKind kind, std::size_t ranks, std::size_t bytes, bool in_plan = false,
                   int per_host = 1) {
  const std::vector<std::size_t> parts(ranks, bytes / ranks);
  Comm comm(0, std::vector<std::vector<Link*>>(ranks), nullptr, slow_network());
  std::vector<int> hosts;
  for (int rank = 0; rank < comm.size(); ++rank) hosts.push_back(rank / per_host);
  comm.set_hosts(HostGrid(hosts), nullptr, false);
  comm.begin({.set = 0, .epoch = in_plan ? 1U : 0U, .batch = 1, .check = 1});
  Call call;
  call.kind = kind;
  call.receive_bytes = parts;
  return choose_algorithm(comm, call, nullptr).name;
}

}  // namespace

TEST_CASE("small allgathers and reducescatters take O(log n) rounds, large ones a ring") {
  for (const std::size_t ranks : {4, 7, 64, 1000}) {
    CAPTURE(ranks);
    CHECK(chosen(OpKind::kAllgather, ranks, ranks * 8) == "bruck");
    CHECK(chosen(OpKind::kAllgather, ranks, ranks << 20) == "ring");
    CHECK(chosen(OpKind::kReducescatter, ranks, ranks * 8) == "halving");
    CHECK(chosen(OpKind::kReducescatter, ranks, ranks << 20) == "ring");
  }
}

TEST_CASE("slices that share the links of hosts are exchanged as the large data that they are") {
  constexpr std::size_t kHosts = 8;
  for (const std::size_t per_host : {1, 8}) {
    std::vector<int> hosts;
    for (std::size_t rank = 0; rank < kHosts * per_host + 1; ++rank) {
      hosts.push_back(static_cast<int>(rank % kHosts));
    }
    Comm comm(0, std::vector<std::vector<Link*>>(hosts.size()), nullptr, slow_network());
    comm.set_hosts(HostGrid(hosts), nullptr, true);
    std::vector<float> slice(8 << 10);
    Layout layout(DType::kFloat32, 1.0);
    layout.add(slice.data(), slice.data(), slice.size() * sizeof(float));
    Call call;
    call.kind = OpKind::kAllreduce;
    call.layout = &layout;
    const std::string name = choose_algorithm(*comm.cross_comm(), call, nullptr).name;
    CHECK(name == (per_host == 1 ? "doubling" : "pairwise"));
  }
}

TEST_CASE("the ranks of a host share its link in the rounds of exchanges over any distance") {
  constexpr std::size_t kBytes = 4 << 20;
  CHECK(chosen(OpKind::kAllgather, 64, kBytes, false, 1) == "bruck");
  CHECK(chosen(OpKind::kAllgather, 64, kBytes, false, 8) == "ring");
  CHECK(chosen(OpKind::kReducescatter, 64, kBytes, false, 1) == "halving");
  CHECK(chosen(OpKind::kReducescatter, 64, kBytes, false, 8) == "ring");
}

TEST_CASE("two ranks exchange their parts in one round without a barrier") {
  CHECK(chosen(OpKind::kAllgather, 2, 16) == "ring");
  CHECK(chosen(OpKind::kAllgather, 2, 16, true) == "bruck");
  CHECK(chosen(OpKind::kReducescatter, 2, 16, true) == "ring");
}
