// Turns a batch of operations into calls of collectives, and their results into outcomes.
#include <bit>
#include <cstring>
#include <numeric>
#include <optional>
#include <span>

#include "base/cache_line.h"
#include "base/hash.h"
#include "collectives/allgather_fixed.h"
#include "collectives/gpu/gpu_group.h"
#include "collectives/gpu/gpu_turns.h"
#include "collectives/gpu/pack.h"
#include "device/cpu/identity_element.h"
#include "engine/execution/executor.h"

namespace horoplug {
namespace {

Allocation allocate(std::size_t bytes) {
  // At least one cache line: an empty result still has an address.
  const std::size_t size = round_up_to_lines(std::max<std::size_t>(bytes, 1));
  Allocation memory(std::aligned_alloc(kCacheLine, size));
  if (!memory) throw std::bad_alloc();
  return memory;
}

// Allocates memory on the operation's GPU for later work in the set's stream. Only that stream uses
// the result of an operation that this rank has not submitted.
Allocation allocate_on_gpu(const Comm& comm, const Operation& operation, std::size_t bytes) {
  const std::shared_ptr<cuda::Device>& device = operation.gpu.device;
  const CUstream work = comm.gpu()->workspace().stream().handle();
  const CUdeviceptr memory = device->allocate(bytes, work);
  return {std::bit_cast<void*>(memory), {device, operation.absent ? work : operation.gpu.stream}};
}

// The reduction, and the factor applied to its result, for a process set of `size` ranks.
void set_reduction(Call& call, const Signature& signature, int size) {
  call.reduce_op = signature.reduce;
  const ReduceOp kernel = signature.reduce == ReduceOp::kAdasum ? ReduceOp::kSum : signature.reduce;
  call.reduce = reduction_of(kernel, signature.dtype, signature.wire);
  call.finish.multiply = signature.postscale;
  call.finish.divide = signature.reduce == ReduceOp::kAverage ? size : 1;
}

Task run(Comm& comm, Call& call, const char* algorithm) {
  if (call.on_gpu && !comm.gpu()->agreed_in_hosts() && may_work_in_hosts(comm, call, algorithm)) {
    co_await comm.gpu()->agree_in_hosts(comm);
  }
  const Algorithm& chosen = choose_algorithm(comm, call, algorithm);
  if (comm.planned() && !chosen.defers_writes) co_await barrier(comm);
  Comm::Queued queued(comm);
  BatchTrace* const trace = comm.trace();
  if (trace != nullptr) {
    if (call.layout != nullptr) call.layout->set_trace(trace);
    trace->begin_transfer(chosen.medium, chosen.name, call.bytes());
  }
  co_await chosen.run(comm, call);
  queued.have_left();
  if (trace != nullptr) trace->end_transfer();
}

std::int64_t sum_of(const std::vector<std::int64_t>& rows) {
  return std::accumulate(rows.begin(), rows.end(), std::int64_t{0});
}

// The number of rows that every rank sends to each rank. `all`: those of all ranks.
Task exchange_splits(Comm& comm, const std::vector<std::int64_t>& mine,
                     std::vector<std::int64_t>& theirs, std::int64_t& all) {
  struct Rows {
    std::int64_t to_you;
    std::int64_t to_all;
  };
  const std::int64_t to_all = sum_of(mine);
  std::vector<Rows> outgoing;
  for (const std::int64_t rows : mine) outgoing.push_back({rows, to_all});
  std::vector<Rows> incoming(mine.size());
  const std::vector<std::size_t> sizes(mine.size(), sizeof(Rows));
  Call call;
  call.kind = OpKind::kAlltoall;
  call.input = reinterpret_cast<const std::byte*>(outgoing.data());
  call.output = reinterpret_cast<std::byte*>(incoming.data());
  call.send_bytes = sizes;
  call.receive_bytes = sizes;
  call.all_bytes = mine.size() * mine.size() * sizeof(Rows);
  co_await run(comm, call, nullptr);
  all = 0;
  for (const Rows& rows : incoming) {
    theirs.push_back(rows.to_you);
    all += rows.to_all;
  }
}

std::vector<std::size_t> bytes_of(const std::vector<std::int64_t>& rows, std::size_t row_bytes) {
  std::vector<std::size_t> bytes;
  bytes.reserve(rows.size());
  for (const std::int64_t count : rows)
    bytes.push_back(static_cast<std::size_t>(count) * row_bytes);
  return bytes;
}

std::size_t row_bytes_of(const Signature& signature, std::size_t tensor) {
  return static_cast<std::size_t>(row_elements(signature.shapes[tensor])) *
         dtype_size(signature.dtype);
}

// Appends one tensor of an operation to a layout.
void add_to(Layout& layout, const Operation& operation, std::size_t index, std::byte* output,
            const EncodingError& error = {}) {
  const Signature& signature = operation.signature();
  const std::int64_t elements = elements_of(signature.shapes[index]);
  if (operation.absent) {
    layout.add_absent(identity_element(signature.reduce, signature.wire_dtype()),
                      signature.wire_bytes(elements));
  } else {
    layout.add(operation.tensors[index].input, output,
               static_cast<std::size_t>(elements) * dtype_size(signature.dtype), error);
  }
}

// Whether a result of `rows` rows fits exactly into the submitted output: see hp_tensor.
bool fills_output(const Comm& comm, const Operation& operation, std::size_t index,
                  std::int64_t rows) {
  if (operation.tensors[index].output == nullptr) return false;
  const std::int64_t mine = rows_of(operation.signature().shapes[index]);
  switch (operation.signature().op) {
    case OpKind::kAllgather:
    case OpKind::kGather:
      return rows == mine * comm.size();
    case OpKind::kAlltoall:
      return rows == mine;
    default:  // the number of rows does not depend on the other ranks
      return true;
  }
}

// Prepares an outcome of `rows` rows in the submitted output or in new memory.
TensorOutcome make_outcome(const Comm& comm, const Operation& operation, std::size_t index,
                           std::int64_t rows) {
  const TensorArgument& tensor = operation.tensors[index];
  const bool in_output = fills_output(comm, operation, index, rows);
  TensorOutcome outcome;
  outcome.rows = rows;
  outcome.bytes = rows * static_cast<std::int64_t>(row_bytes_of(operation.signature(), index));
  const auto bytes = static_cast<std::size_t>(outcome.bytes);
  if (!in_output) {
    outcome.owned =
        operation.gpu.device ? allocate_on_gpu(comm, operation, bytes) : allocate(bytes);
  }
  outcome.data = in_output ? tensor.output : outcome.owned.get();
  return outcome;
}

// The position of a batch's tensors in a shared buffer: see Call::place.
std::uint64_t place_of(std::span<const OperationPtr> operations, std::vector<std::ptrdiff_t>& to) {
  const std::shared_ptr<SharedBuffer>& buffer = operations.front()->buffer;
  if (!buffer || !buffer->shared()) return 0;
  const Signature& signature = operations.front()->signature();
  if (signature.prescale != 1.0 || signature.wire != nullptr) return 0;
  std::uint64_t place = buffer->number();
  for (const OperationPtr& operation : operations) {
    if (operation->absent || operation->buffer != buffer) return 0;
    for (const TensorArgument& tensor : operation->tensors) {
      place = (place ^ buffer->offset(tensor.input)) * 0x9E3779B97F4A7C15;
      place ^= place >> 32;
    }
  }
  for (const int rank : operations.front()->members->ranks) to.push_back(buffer->distance(rank));
  return place | 1;
}

// The outputs of a reduce on ranks other than the root are their inputs.
void pass_inputs_on(const Comm& comm, const Call& call) {
  if (call.on_gpu) return pass_on_gpu(comm.gpu()->workspace(), call);
  call.layout->for_each_tensor([](const Layout::Tensor& tensor) {
    if (tensor.output == nullptr || tensor.output == tensor.input) return;
    std::memcpy(tensor.output, tensor.input, tensor.bytes);
  });
}

// What the wire format keeps of one tensor; nothing under a generated name, which does not recur.
EncodingError begin_state(const Operation& operation, std::size_t index,
                          std::vector<TensorStates::Update>& states) {
  const Signature& signature = operation.signature();
  if (signature.wire == nullptr || !signature.wire->keeps_error) return {};
  if (operation.absent || !signature.recurring) return {};
  const auto elements = static_cast<std::size_t>(elements_of(signature.shapes[index]));
  states.push_back(operation.members->states->begin(operation.name(), index, elements));
  const TensorStates::Update& state = states.back();
  return {state.before ? state.before->data() : nullptr, state.after->data()};
}

// Allreduce, broadcast and reduce: all tensors of all operations form one buffer.
Task run_fused(Comm& comm, std::span<const OperationPtr> operations, const char* algorithm) {
  const Signature& signature = operations.front()->signature();
  Layout layout(signature.dtype, signature.prescale, signature.wire);
  std::vector<TensorStates::Update> states;
  for (const OperationPtr& operation : operations) {
    for (std::size_t i = 0; i < operation->tensors.size(); ++i) {
      const TensorArgument& tensor = operation->tensors[i];
      add_to(layout, *operation, i, tensor.output, begin_state(*operation, i, states));
      if (operation->absent) continue;
      operation->outcomes.push_back(
          make_outcome(comm, *operation, i, rows_of(operation->signature().shapes[i])));
    }
  }
  if (layout.bytes() == 0) {
    if (comm.planned()) co_await barrier(comm);
    co_return;
  }
  Call call;
  call.kind = signature.op;
  call.dtype = signature.wire_dtype();
  call.wire = signature.wire;
  call.on_gpu = signature.device >= 0;
  call.layout = &layout;
  const OperationInfo& info = operation_info(signature.op);
  if (info.has_root) {
    call.root = operations.front()->members->index_of(signature.root);
  }
  std::vector<std::ptrdiff_t> distances;
  if (info.reduces) set_reduction(call, signature, comm.size());
  if (signature.op == OpKind::kAllreduce) {
    call.place = place_of(operations, distances);
    call.distances = distances;
  }
  co_await run(comm, call, algorithm);
  if (!states.empty()) operations.front()->members->states->complete(std::move(states));
  if (signature.op == OpKind::kReduce && call.root != comm.rank()) pass_inputs_on(comm, call);
}

// The call for one tensor of an operation whose ranks contribute or receive rows. The call refers
// to `receive_bytes`.
Call rows_call(const Operation& operation, const TensorOutcome& outcome,
               std::span<const std::size_t> receive_bytes) {
  const Signature& signature = operation.signature();
  Call call;
  call.kind = signature.op;
  call.dtype = signature.dtype;
  call.on_gpu = signature.device >= 0;
  if (operation_info(signature.op).has_root) {
    call.root = operation.members->index_of(signature.root);
  }
  call.output = static_cast<std::byte*>(outcome.data);
  call.receive_bytes = receive_bytes;
  return call;
}

// One tensor of an allgather.
struct Gathered {
  Operation* operation;
  std::size_t index;               // of the tensor
  std::vector<std::size_t> bytes;  // by rank
  TensorOutcome outcome;

  Call to_call() const {
    Call call = rows_call(*operation, outcome, bytes);
    call.input = operation->tensors[index].input;
    return call;
  }
};

// The row counts of all tensors of all ranks, in one exchange.
Task exchange_rows(Comm& comm, std::span<const OperationPtr> operations,
                   std::vector<Gathered>& tensors) {
  std::vector<std::int64_t> mine;
  for (const OperationPtr& operation : operations) {
    for (std::size_t i = 0; i < operation->tensors.size(); ++i) {
      mine.push_back(rows_of(operation->signature().shapes[i]));
      tensors.push_back({operation.get(), i, {}, {}});
    }
  }
  const auto ranks = static_cast<std::size_t>(comm.size());
  std::vector<std::int64_t> all(ranks * mine.size());
  co_await allgather_fixed_bytes(comm, mine.data(), mine.size() * sizeof(std::int64_t), all.data());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    Gathered& tensor = tensors[i];
    std::vector<std::int64_t> rows;
    for (std::size_t rank = 0; rank < ranks; ++rank) rows.push_back(all[rank * mine.size() + i]);
    tensor.bytes = bytes_of(rows, row_bytes_of(tensor.operation->signature(), tensor.index));
    tensor.outcome = make_outcome(comm, *tensor.operation, tensor.index, sum_of(rows));
    tensor.outcome.row_counts = std::move(rows);
  }
}

// Several small tensors as one, through buffers for what this rank contributes and what it gets.
Task gather_fused(Comm& comm, std::span<Gathered> tensors, const char* algorithm) {
  const auto me = static_cast<std::size_t>(comm.rank());
  std::vector<std::size_t> bytes(static_cast<std::size_t>(comm.size()), 0);
  for (const Gathered& tensor : tensors) {
    for (std::size_t rank = 0; rank < bytes.size(); ++rank) bytes[rank] += tensor.bytes[rank];
  }
  std::vector<std::byte> mine;
  mine.reserve(bytes[me]);
  for (const Gathered& tensor : tensors) {
    const std::byte* const input = tensor.to_call().input;
    mine.insert(mine.end(), input, input + tensor.bytes[me]);
  }
  std::vector<std::byte> all(std::accumulate(bytes.begin(), bytes.end(), std::size_t{0}));
  Call call = tensors.front().to_call();
  call.input = mine.data();
  call.output = all.data();
  call.receive_bytes = bytes;
  co_await run(comm, call, algorithm);

  std::vector<std::byte*> outputs;
  for (const Gathered& tensor : tensors) outputs.push_back(tensor.to_call().output);
  const std::byte* from = all.data();
  for (std::size_t rank = 0; rank < bytes.size(); ++rank) {
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const std::size_t part = tensors[i].bytes[rank];
      if (part > 0) std::memcpy(outputs[i], from, part);
      outputs[i] += part;
      from += part;
    }
  }
}

// The row counts of all operations are exchanged at once, and consecutive small tensors are fused.
Task run_allgathers(Comm& comm, std::span<const OperationPtr> operations, const char* algorithm) {
  constexpr std::int64_t kMostFused = 256 << 10;  // bytes of all ranks
  std::vector<Gathered> tensors;
  co_await exchange_rows(comm, operations, tensors);
  const bool on_gpu = operations.front()->signature().device >= 0;
  for (std::size_t i = 0; i < tensors.size();) {
    std::int64_t bytes = tensors[i].outcome.bytes;
    std::size_t end = i + 1;
    while (end < tensors.size() && !on_gpu && bytes + tensors[end].outcome.bytes <= kMostFused) {
      bytes += tensors[end++].outcome.bytes;
    }
    if (bytes > 0 && end - i > 1) {
      co_await gather_fused(comm, std::span(tensors).subspan(i, end - i), algorithm);
    } else if (bytes > 0) {
      Call call = tensors[i].to_call();
      co_await run(comm, call, algorithm);
    }
    i = end;
  }
  for (Gathered& tensor : tensors) tensor.operation->outcomes.push_back(std::move(tensor.outcome));
}

// Whether a rank sends rows to a rank that has joined, which would be lost. All ranks reach the
// same result, which is the operation's failure.
Task check_absent(Comm& comm, Operation& operation, const RankRanges& absent) {
  std::int64_t lost = 0;
  std::vector<int> joined;
  for (std::size_t i = 0; i < operation.splits.size(); ++i) {
    const int rank = operation.members->ranks[i];
    if (!absent.contains(rank)) continue;
    lost += operation.splits[i];
    joined.push_back(rank);
  }
  std::vector<std::int64_t> losses;
  co_await allgather_fixed(comm, lost, losses);
  std::vector<int> senders;
  for (std::size_t i = 0; i < losses.size(); ++i) {
    if (losses[i] > 0) senders.push_back(operation.members->ranks[i]);
  }
  if (senders.empty()) co_return;
  operation.status = {HP_MISMATCH, operation.describe() + " failed: " + describe_ranks(senders) +
                                       " would send rows to " + describe_ranks(joined) +
                                       ", where join() was called; give splits that are 0 there"};
}

Task run_alltoall(Comm& comm, Operation& operation, const RankRanges& absent, std::size_t index,
                  const char* algorithm) {
  if (!absent.empty()) {
    co_await check_absent(comm, operation, absent);
    if (!operation.status.ok()) co_return;
  }
  const std::size_t row_bytes = row_bytes_of(operation.signature(), index);
  std::vector<std::int64_t> rows;
  std::int64_t all_rows = 0;
  co_await exchange_splits(comm, operation.splits, rows, all_rows);
  const auto send_bytes = bytes_of(operation.splits, row_bytes);
  const auto receive_bytes = bytes_of(rows, row_bytes);
  TensorOutcome outcome = make_outcome(comm, operation, index, sum_of(rows));
  outcome.row_counts = std::move(rows);

  Call call = rows_call(operation, outcome, receive_bytes);
  call.input = operation.tensors[index].input;
  call.send_bytes = send_bytes;
  call.all_bytes = static_cast<std::size_t>(all_rows) * row_bytes;
  co_await run(comm, call, algorithm);
  operation.outcomes.push_back(std::move(outcome));
}

Task run_reducescatter(Comm& comm, Operation& operation, std::size_t index, const char* algorithm) {
  const Signature& signature = operation.signature();
  const Shape& shape = signature.shapes[index];
  const std::size_t row_bytes = row_bytes_of(signature, index);
  const auto rows = even_rows(rows_of(shape), comm.size());
  const auto bytes = bytes_of(rows, row_bytes);
  TensorOutcome outcome =
      make_outcome(comm, operation, index, rows[static_cast<std::size_t>(comm.rank())]);
  Layout layout(signature.dtype, signature.prescale);
  add_to(layout, operation, index, nullptr);

  Call call = rows_call(operation, outcome, bytes);
  call.layout = &layout;
  set_reduction(call, signature, comm.size());
  if (layout.bytes() > 0) {
    co_await run(comm, call, algorithm);
  } else if (comm.planned()) {
    co_await barrier(comm);
  }
  operation.outcomes.push_back(std::move(outcome));
}

// The result is the root's; the others get no rows.
Task run_gather(Comm& comm, Operation& operation, std::size_t index, const char* algorithm) {
  const Signature& signature = operation.signature();
  const std::size_t row_bytes = row_bytes_of(signature, index);
  std::vector<std::int64_t> rows;
  const std::int64_t mine = rows_of(signature.shapes[index]);
  co_await allgather_fixed(comm, mine, rows);
  const auto bytes = bytes_of(rows, row_bytes);
  const bool is_root = operation.members->index_of(signature.root) == comm.rank();
  TensorOutcome outcome = make_outcome(comm, operation, index, is_root ? sum_of(rows) : 0);
  if (is_root) outcome.row_counts = std::move(rows);

  Call call = rows_call(operation, outcome, bytes);
  call.input = operation.tensors[index].input;
  if (call.bytes() > 0) co_await run(comm, call, algorithm);
  operation.outcomes.push_back(std::move(outcome));
}

// Values that one rank sends to all ranks.
Task broadcast_counts(Comm& comm, int root, std::vector<std::int64_t>& counts) {
  Layout layout(DType::kInt64, 1.0);
  layout.add(counts.data(), counts.data(), counts.size() * sizeof(std::int64_t));
  Call call;
  call.kind = OpKind::kBroadcast;
  call.dtype = DType::kInt64;
  call.layout = &layout;
  call.root = root;
  co_await run(comm, call, nullptr);
}

// Only the root knows how many rows each rank gets.
Task run_scatter(Comm& comm, Operation& operation, std::size_t index, const char* algorithm) {
  const Signature& signature = operation.signature();
  const int root = operation.members->index_of(signature.root);
  std::vector<std::int64_t> rows = operation.splits;
  co_await broadcast_counts(comm, root, rows);
  const auto bytes = bytes_of(rows, row_bytes_of(signature, index));
  TensorOutcome outcome =
      make_outcome(comm, operation, index, rows[static_cast<std::size_t>(comm.rank())]);

  Call call = rows_call(operation, outcome, bytes);
  call.input = operation.tensors[index].input;
  if (call.bytes() > 0) co_await run(comm, call, algorithm);
  operation.outcomes.push_back(std::move(outcome));
}

Task run_barrier(Comm& comm, const char* algorithm) {
  Call call;
  co_await run(comm, call, algorithm);
}

// The operations of all other kinds.
Task run_one_by_one(Comm& comm, Batch& batch, const char* algorithm) {
  const std::span<const OperationPtr> operations = batch.operations;
  const OpKind kind = operations.front()->signature().op;
  static const RankRanges no_ranks;
  for (std::size_t at = 0; at < operations.size(); ++at) {
    const OperationPtr& operation = operations[at];
    const RankRanges& absent = at < batch.absent.size() ? batch.absent[at] : no_ranks;
    if (kind == OpKind::kBarrier) co_await run_barrier(comm, algorithm);
    for (std::size_t i = 0; i < operation->tensors.size(); ++i) {
      if (kind == OpKind::kAlltoall) {
        co_await run_alltoall(comm, *operation, absent, i, algorithm);
      } else if (kind == OpKind::kReducescatter) {
        co_await run_reducescatter(comm, *operation, i, algorithm);
      } else if (kind == OpKind::kGather) {
        co_await run_gather(comm, *operation, i, algorithm);
      } else if (kind == OpKind::kScatter) {
        co_await run_scatter(comm, *operation, i, algorithm);
      }
    }
  }
}

Task run_operations(Comm& comm, Batch& batch, const char* algorithm) {
  const OpKind kind = batch.operations.front()->signature().op;
  if (operation_info(kind).fuses) return run_fused(comm, batch.operations, algorithm);
  if (kind == OpKind::kAllgather) return run_allgathers(comm, batch.operations, algorithm);
  return run_one_by_one(comm, batch, algorithm);
}

// Equal for batches that need the same kernels and about the same amount of memory.
std::uint64_t kind_of(const Batch& batch) {
  const Signature& s = batch.operations.front()->signature();
  std::uint64_t bytes = 0, tensors = 0;
  for (const OperationPtr& operation : batch.operations) {
    bytes += static_cast<std::uint64_t>(operation->identity->bytes);
    tensors += operation->signature().shapes.size();
  }
  Hash hash;
  for (const std::uint64_t part :
       {static_cast<std::uint64_t>(s.op), static_cast<std::uint64_t>(s.dtype),
        static_cast<std::uint64_t>(s.wire_code()), static_cast<std::uint64_t>(s.reduce),
        std::uint64_t{s.prescale != 1.0}, std::uint64_t{s.postscale != 1.0},
        static_cast<std::uint64_t>(std::bit_width(bytes)),
        static_cast<std::uint64_t>(std::bit_width(tensors))}) {
    hash.add(part);
  }
  return hash.value();
}

// All GPU work of a batch lies between two events: after the framework's streams have reached the
// point of submission, and before work that waits for the results.
Task run_on_gpu(Comm& comm, Batch& batch, const char* algorithm) {
  std::optional<GpuTurn> turn;
  if (batch.turns != nullptr) {
    turn.emplace(*batch.turns, batch.operations.front()->members->set);
    co_await turn->come(comm);
  }
  if (comm.gpu() == nullptr) {
    comm.set_gpu(std::make_shared<GpuGroup>(batch.operations.front()->gpu.device));
  }
  GpuGroup& gpu = *comm.gpu();
  if (gpu.is_first(kind_of(batch))) co_await Idle(comm, gpu.workspace().device());
  if (!gpu.agreed()) co_await gpu.agree(comm, algorithm);
  const cuda::Event* last = nullptr;
  for (const OperationPtr& operation : batch.operations) {
    const cuda::Event* const ready = operation->gpu.ready.get();
    if (ready == nullptr || ready == last) continue;
    gpu.workspace().stream().wait_for(ready->handle());
    last = ready;
  }
  const cuda::EventPtr begun = gpu.workspace().mark();
  co_await run_operations(comm, batch, algorithm);
  const cuda::EventPtr ended = gpu.workspace().mark();
  for (const OperationPtr& operation : batch.operations) operation->gpu.finished = ended;
  gpu.track(batch.describe(), begun, ended);
}

}  // namespace

Task run_batch(Comm& comm, Batch& batch, const char* algorithm) {
  return batch.on_gpu() ? run_on_gpu(comm, batch, algorithm)
                        : run_operations(comm, batch, algorithm);
}

}  // namespace horoplug
