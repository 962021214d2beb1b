#include "engine/execution/make_process_set.h"

#include <algorithm>

#include "base/host_grid.h"

namespace horoplug {
namespace {

// The same tree with global ranks.
TreePosition with_global_ranks(TreePosition position, const Members& members) {
  const auto global = [&](int& index) { index = members.ranks[static_cast<std::size_t>(index)]; };
  global(position.rank);
  if (position.parent >= 0) global(position.parent);
  std::for_each(position.children.begin(), position.children.end(), global);
  for (auto& below : position.subtrees) std::for_each(below.begin(), below.end(), global);
  return position;
}

TunerOptions tuner_options(const EngineOptions& options) {
  TunerOptions tuner = options.tuner;
  if (options.autotune) tuner.mode = *options.autotune ? Autotune::kAll : Autotune::kOff;
  tuner.fixed = static_cast<std::uint32_t>(options.autotune_fixed);
  tuner.warmup = options.autotune_warmup;
  tuner.turns = options.autotune_steps;
  tuner.choices = options.autotune_samples;
  return tuner;
}

}  // namespace

std::unique_ptr<ProcessSet> make_process_set(const EngineConfig& config, Mesh& mesh,
                                             const MembersPtr& members,
                                             std::vector<Segment> segments) {
  const int here = config.self().host;
  std::vector<int> hosts;
  std::vector<int> local;
  std::vector<std::vector<Link*>> links;
  int most_lanes = 1;
  std::vector<std::shared_ptr<Doorbell>> doorbells;
  for (const int rank : members->ranks) {
    const Member& member = config.members[rank];
    hosts.push_back(member.host);
    links.push_back(mesh.data_lanes(rank));
    most_lanes = std::max(most_lanes, static_cast<int>(links.back().size()));
    if (member.host != here) continue;
    local.push_back(rank);
    doorbells.push_back(member.doorbell);
  }
  const HostGrid grid(hosts);
  std::unique_ptr<HostMemory> host_memory;
  if (segments.size() == local.size() && local.size() > 1) {
    std::vector<Arena> arenas(segments.begin(), segments.end());
    host_memory = std::make_unique<HostMemory>(grid.local_rank(members->index), std::move(arenas),
                                               std::move(doorbells), local);
  }
  auto comm =
      std::make_unique<Comm>(members->index, std::move(links),
                             grid.hosts() == 1 ? host_memory.get() : nullptr, config.options.costs);
  if (grid.hosts() > 1) {
    // A rank that is alone on its host knows by its own segment whether those of other hosts share
    // memory: sets that are added later need segments that are files.
    const Member& self = config.self();
    const bool shares = local.size() > 1
                            ? host_memory != nullptr
                            : members->set == 0 || !self.segment || bool(self.segment_file);
    comm->set_hosts(grid, host_memory.get(), shares);
  }
  if (config.options.encrypted && grid.hosts() > 1) comm->forbid_nccl();
  // Only the global set uses MPI's own collectives. Those of a second set with the same ranks would
  // run at the same time and match the wrong calls.
  if (members->set == 0) comm->set_mpi(config.mpi.get());
  Negotiator::Options options;
  options.fusion_threshold = config.options.fusion_threshold;
  options.fuse_groups = !config.options.separate_groups;
  options.cache_capacity = static_cast<std::size_t>(config.options.cache_capacity);
  options.plan_after = config.options.plan_after;
  options.restart = config.options.restart;
  options.tuning.bucket_bytes = config.options.bucket_bytes;
  options.tuner = tuner_options(config.options);
  options.placement = {
      .ranks = members->size(), .one_host = grid.hosts() == 1, .lanes = most_lanes};
  const auto run = [on_cpu = config.options.algorithm, on_gpu = config.options.gpu_algorithm](
                       Comm& set_comm, Batch& batch) {
    const std::string& forced = batch.on_gpu() && !on_gpu.empty() ? on_gpu : on_cpu;
    return run_batch(set_comm, batch, forced.empty() ? nullptr : forced.c_str());
  };
  TreePosition position = with_global_ranks(Topology(hosts).position(members->index), *members);
  return std::make_unique<ProcessSet>(members, std::move(host_memory), std::move(position), options,
                                      std::move(comm), run);
}

}  // namespace horoplug
