// What algorithms require of a call: the column `can` of the table of algorithms. The answers may
// depend only on what all ranks know alike.
#pragma once

#include "collectives/collective.h"

namespace horoplug::requirements {

bool alone(const Comm& comm, const Call&);
bool on_one_host(const Comm& comm, const Call&);
bool has_peers(const Comm& comm, const Call&);
// An allreduce reduces either element by element or by Adasum.
bool elementwise_on_one_host(const Comm& comm, const Call& call);
bool fits_into_lines(const Comm& comm, const Call& call);
bool elementwise(const Comm& comm, const Call& call);
// The sums of some ranks may be encoded: WireFormat::partial_sums.
bool by_partial_sums(const Comm& comm, const Call& call);
bool adasum(const Comm& comm, const Call& call);
bool adasum_on_one_host(const Comm& comm, const Call& call);
// There are several hosts, at least one of them with several ranks, which share memory.
bool on_many_hosts(const Comm& comm, const Call& call);
// They have equally many ranks each.
bool on_even_hosts(const Comm& comm, const Call& call);
// Whether MPI has the collective, can count its data, and gives equal results on all ranks.
bool by_mpi(const Comm& comm, const Call& call);
bool by_nccl(const Comm& comm, const Call& call);
bool by_ipc(const Comm& comm, const Call& call);
bool adasum_by_nccl(const Comm& comm, const Call& call);
bool adasum_by_ipc(const Comm& comm, const Call& call);
// Through the CPU's memory, also if GPUs do not have the wire format.
bool through_cpu(const Comm& comm, const Call& call);
bool alone_on_gpu(const Comm& comm, const Call& call);
// As on the host, if MPI accepts the memory of all ranks' GPUs.
bool on_gpu_by_mpi(const Comm& comm, const Call& call);
// Reduced within each host first, on its GPUs.
bool by_hosts(const Comm& comm, const Call& call);

}  // namespace horoplug::requirements
