#include "collectives/stream/tree.h"

#include <functional>

namespace horoplug {
namespace {

// A position in a list of places; the tree's root is place 0.
struct Place {
  int index;
  int count;
};

// Appends the neighbours of a place in a binomial tree. A place's parent is found by clearing its
// lowest bit.
void add_binomial(Place place, const std::function<int(int index)>& rank, TreeNeighbours& tree) {
  const int lowest = place.index & -place.index;
  if (place.index != 0) tree.parent = rank(place.index - lowest);
  int bit = 1;
  while (bit < (place.index == 0 ? place.count : lowest)) bit *= 2;
  for (bit /= 2; bit > 0; bit /= 2) {
    if (place.index + bit < place.count) tree.children.push_back(rank(place.index + bit));
  }
}

// The hosts counted from the root's on, and the ranks of each host with the one first that is
// connected to other hosts: the root on its host, and the first rank on others.
class FromRoot {
 public:
  FromRoot(const HostGrid& hosts, int root) : hosts_(hosts), root_(root) {}

  int host_place(int rank) const {
    return (hosts_.host(rank) - hosts_.host(root_) + hosts_.hosts()) % hosts_.hosts();
  }
  const std::vector<int>& ranks(int host_place) const {
    const int host = (hosts_.host(root_) + host_place) % hosts_.hosts();
    return hosts_.members()[static_cast<std::size_t>(host)];
  }
  int local_place(int rank) const {
    const int local = hosts_.local_rank(rank);
    if (host_place(rank) != 0) return local;
    const int first = hosts_.local_rank(root_);
    return local == first ? 0 : local < first ? local + 1 : local;
  }
  int rank(int host_place, int local_place) const {
    if (host_place != 0) return ranks(host_place)[static_cast<std::size_t>(local_place)];
    if (local_place == 0) return root_;
    const int first = hosts_.local_rank(root_);
    const int local = local_place <= first ? local_place - 1 : local_place;
    return ranks(0)[static_cast<std::size_t>(local)];
  }

 private:
  const HostGrid& hosts_;
  const int root_;
};

}  // namespace

TreeNeighbours binomial_tree(const Comm& comm, int root) {
  TreeNeighbours tree;
  if (comm.hosts() == nullptr) {
    const int size = comm.size();
    add_binomial(
        {(comm.rank() - root + size) % size, size},
        [&](int index) { return (root + index) % size; }, tree);
    return tree;
  }
  const HostGrid& hosts = *comm.hosts();
  const FromRoot order(hosts, root);
  const int host = order.host_place(comm.rank());
  const int local = order.local_place(comm.rank());
  if (local == 0) {
    add_binomial({host, hosts.hosts()}, [&](int index) { return order.rank(index, 0); }, tree);
  }
  add_binomial(
      {local, static_cast<int>(order.ranks(host).size())},
      [&](int index) { return order.rank(host, index); }, tree);
  return tree;
}

TreeNeighbours chain(const Comm& comm, int root) {
  TreeNeighbours tree;
  const int size = comm.size();
  if (comm.hosts() == nullptr) {
    const int me = (comm.rank() - root + size) % size;
    if (me > 0) tree.parent = (comm.rank() + size - 1) % size;
    if (me + 1 < size) tree.children.push_back((comm.rank() + 1) % size);
    return tree;
  }
  const FromRoot order(*comm.hosts(), root);
  const int host = order.host_place(comm.rank());
  const int local = order.local_place(comm.rank());
  const auto last_of = [&](int of) { return static_cast<int>(order.ranks(of).size()) - 1; };
  if (local > 0) {
    tree.parent = order.rank(host, local - 1);
  } else if (host > 0) {
    tree.parent = order.rank(host - 1, last_of(host - 1));
  }
  if (local < last_of(host)) {
    tree.children.push_back(order.rank(host, local + 1));
  } else if (host + 1 < comm.hosts()->hosts()) {
    tree.children.push_back(order.rank(host + 1, 0));
  }
  return tree;
}

}  // namespace horoplug
