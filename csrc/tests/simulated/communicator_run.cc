// How a rank of a simulated communicator runs its operations in a stream.
#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "device/cpu/kernels.h"
#include "tests/simulated/communicator.h"

namespace horoplug::testing::simulated {

using cuda::kNcclInProgress;
using cuda::kNcclSuccess;

namespace {

constexpr const char* kKindNames[] = {"AllReduce", "ReduceScatter", "AllGather", "Broadcast",
                                      "Reduce",    "Send",          "Recv"};

bool is_point_to_point(Kind kind) { return kind == Kind::kSend || kind == Kind::kRecv; }

// Indexed by ncclDataType_t.
struct ElementType {
  const char* name;
  DType dtype;
};
constexpr ElementType kTypes[] = {
    {"int8", DType::kInt8},
    {"uint8", DType::kUInt8},
    {"int32", DType::kInt32},
    {"uint32", DType::kUInt32},
    {"int64", DType::kInt64},
    {"uint64", DType::kUInt64},
    {"float16", DType::kFloat16},
    {"float32", DType::kFloat32},
    {"float64", DType::kFloat64},
    {"bfloat16", DType::kBFloat16},
    {"float8e4m3", DType::kFloat8E4M3FN},
    {"float8e5m2", DType::kFloat8E5M2},
};
constexpr int kTypeCount = static_cast<int>(std::size(kTypes));

// Indexed by ncclRedOp_t.
struct Reduction {
  const char* name;
  ReduceOp op;
  bool average;
};
constexpr Reduction kReductions[] = {{"sum", ReduceOp::kSum, false},
                                     {"product", ReduceOp::kProduct, false},
                                     {"max", ReduceOp::kMax, false},
                                     {"min", ReduceOp::kMin, false},
                                     {"average", ReduceOp::kSum, true}};
constexpr int kReductionCount = static_cast<int>(std::size(kReductions));

bool reduces(Kind kind) {
  return kind == Kind::kAllReduce || kind == Kind::kReduceScatter || kind == Kind::kReduce;
}

std::string describe(const Posted& posted) {
  std::string text = std::string(kKindNames[static_cast<int>(posted.kind)]) + " of " +
                     std::to_string(posted.count) + " " + kTypes[posted.dtype].name;
  if (reduces(posted.kind)) text += std::string(", ") + kReductions[posted.op].name;
  if (posted.kind == Kind::kReduce) return text + " to rank " + std::to_string(posted.root);
  if (posted.kind == Kind::kBroadcast) return text + " from rank " + std::to_string(posted.root);
  return text;
}

// The number of elements that an operation reads from a rank and writes to it.
std::size_t input_count(const Posted& what, int rank, int ranks) {
  switch (what.kind) {
    case Kind::kReduceScatter:
      return what.count * static_cast<std::size_t>(ranks);
    case Kind::kBroadcast:
      return rank == what.root ? what.count : 0;
    case Kind::kRecv:
      return 0;
    default:
      return what.count;
  }
}
std::size_t output_count(const Posted& what, int rank, int ranks) {
  if (what.kind == Kind::kSend || (what.kind == Kind::kReduce && rank != what.root)) return 0;
  return what.kind == Kind::kAllGather ? what.count * static_cast<std::size_t>(ranks) : what.count;
}

std::string staged_name(const std::string& communicator, int rank, std::uint32_t number) {
  return communicator + "-r" + std::to_string(rank) + "n" + std::to_string(number);
}
std::string message_name(const std::string& communicator, int from, int to, std::uint32_t number) {
  return communicator + "-f" + std::to_string(from) + "t" + std::to_string(to) + "n" +
         std::to_string(number);
}

}  // namespace

std::size_t Operation::element() const { return dtype_size(kTypes[what.dtype].dtype); }

// Operations that run as one task of a stream.
struct Communicator::Group {
  std::shared_ptr<Communicator> owner;
  std::vector<Operation> operations;
  std::uint32_t number;
};

ncclResult_t Communicator::check(const Operation& operation, CUstream stream) {
  const Posted& what = operation.what;
  if (state() != kNcclSuccess) return not_ready();
  if (what.dtype < 0 || what.dtype >= kTypeCount) {
    return refuse("an unknown data type", kInvalidArgument);
  }
  if (reduces(what.kind) && (what.op < 0 || what.op >= kReductionCount)) {
    return refuse("an unknown reduction", kInvalidArgument);
  }
  if (what.root < 0 || what.root >= ranks) return refuse("no such rank", kInvalidArgument);
  const int on = shared_->gpu.stream_device(stream, device);
  if (on == device) return kNcclSuccess;
  shared_->gpu.misuse("NCCL is called with a stream of another device than the communicator's");
  return kInvalidUsage;
}

ncclResult_t Communicator::enqueue(std::vector<Operation> operations, CUstream stream, bool late) {
  join();
  if (!late) return enqueue_now(std::move(operations), stream);
  set_async_error(kNcclInProgress);
  thread_ = std::thread([this, operations = std::move(operations), stream]() mutable {
    std::this_thread::sleep_for(std::chrono::microseconds(300));
    set_async_error(enqueue_now(std::move(operations), stream));
  });
  return kNcclInProgress;
}

ncclResult_t Communicator::enqueue_now(std::vector<Operation> operations, CUstream stream) {
  std::vector<const void*> memory;
  std::vector<std::size_t> bytes;
  for (Operation& one : operations) {
    const auto peer = static_cast<std::size_t>(one.peer());
    one.number = one.what.kind == Kind::kSend   ? ++sent_[peer]
                 : one.what.kind == Kind::kRecv ? ++received_[peer]
                                                : ++collectives_;
    memory.insert(memory.end(), {one.send, one.receive});
    bytes.push_back(input_count(one.what, rank, ranks) * one.element());
    bytes.push_back(output_count(one.what, rank, ranks) * one.element());
  }
  const char* const name = operations.size() == 1
                               ? kKindNames[static_cast<int>(operations.front().what.kind)]
                               : "NCCL group";
  auto* const group = new Group{shared_from_this(), std::move(operations), ++groups_};
  const CUresult result = shared_->gpu.enqueue(
      stream, device, name,
      [](void* data) {
        const auto* const mine = static_cast<Group*>(data);
        mine->owner->run(*mine);
      },
      group, [](void* data) { delete static_cast<Group*>(data); }, memory.data(), bytes.data(),
      memory.size());
  return result == cuda::kSuccess ? kNcclSuccess : kUnhandledCudaError;
}

void Communicator::run(const Group& group) {
  ++running_;
  if (!aborted_.load() && wait(turn_, group.number - 1) && run_all(group)) {
    advance_to(turn_, group.number);
  }
  --running_;
}

bool Communicator::run_all(const Group& group) {
  std::vector<Operation> point_to_point;
  for (const Operation& one : group.operations) {
    if (is_point_to_point(one.what.kind)) {
      point_to_point.push_back(one);
    } else if (!run_collective(one)) {
      return false;
    }
  }
  return run_point_to_point(point_to_point);
}

bool Communicator::run_collective(const Operation& operation) {
  const std::size_t bytes = input_count(operation.what, rank, ranks) * operation.element();
  Copy copy = publish(staged_name(name_, rank, operation.number), operation.send, bytes);
  CommunicatorMemory::Rank& me = mine();
  me.operation = operation.what;
  me.operation.data = reinterpret_cast<std::uintptr_t>(copy.data);
  advance_to(me.posted, operation.number);
  std::vector<const std::byte*> inputs;
  for (int i = 0; i < ranks; ++i) {
    CommunicatorMemory::Rank& other = memory_->ranks[i];
    if (!wait(other.posted, operation.number)) {
      withdraw(std::move(copy), true);
      return false;
    }
    if (!me.operation.matches(other.operation)) {
      mismatch(me.operation, i, other.operation);
      withdraw(std::move(copy), true);
      return false;
    }
    const std::size_t its_bytes = input_count(operation.what, i, ranks) * operation.element();
    inputs.push_back(
        i == rank ? copy.data
                  : fetch(staged_name(name_, i, operation.number), other.operation, its_bytes));
  }
  compute(operation, inputs);
  for (int i = 0; i < ranks; ++i) {
    if (i != rank) release(staged_name(name_, i, operation.number));
  }
  advance_to(me.done, operation.number);
  bool all = true;
  for (int i = 0; i < ranks && all; ++i) all = wait(memory_->ranks[i].done, operation.number);
  withdraw(std::move(copy), !all);
  return all;
}

void Communicator::compute(const Operation& operation,
                           const std::vector<const std::byte*>& inputs) const {
  const Posted& what = operation.what;
  const std::size_t bytes = what.count * operation.element();
  auto* const to = static_cast<std::byte*>(operation.receive);
  const auto at = static_cast<std::size_t>(rank);
  if (bytes == 0 || (what.kind == Kind::kReduce && rank != what.root)) return;
  if (what.kind == Kind::kBroadcast) {
    std::memcpy(to, inputs[static_cast<std::size_t>(what.root)], bytes);
  } else if (what.kind == Kind::kAllGather) {
    for (std::size_t i = 0; i < inputs.size(); ++i) std::memcpy(to + i * bytes, inputs[i], bytes);
  } else {
    const std::size_t offset = what.kind == Kind::kReduceScatter ? at * bytes : 0;
    std::vector<const void*> sources;
    for (const std::byte* input : inputs) sources.push_back(input + offset);
    const Reduction& reduction = kReductions[what.op];
    const Finish finish{1.0, reduction.average ? static_cast<double>(ranks) : 1.0};
    kernels().reduce[static_cast<int>(reduction.op)][static_cast<int>(kTypes[what.dtype].dtype)](
        to, sources.data(), ranks, what.count, finish);
  }
}

bool Communicator::run_point_to_point(const std::vector<Operation>& operations) {
  // Round n has the n-th send to and the n-th recv from each peer. In each round a rank sends
  // before it receives, so that ranks cannot deadlock.
  std::vector<std::vector<Operation>> rounds;
  std::array<std::size_t, kMaxRanks> to{}, from{};
  for (const Operation& one : operations) {
    auto& counts = one.what.kind == Kind::kSend ? to : from;
    const std::size_t round = counts[static_cast<std::size_t>(one.peer())]++;
    if (rounds.size() <= round) rounds.resize(round + 1);
    rounds[round].push_back(one);
  }
  for (const std::vector<Operation>& round : rounds) {
    std::vector<Copy> copies;
    bool ok = true;
    for (const Operation& one : round) {
      if (ok && one.what.kind == Kind::kSend) ok = send(one, &copies.emplace_back());
    }
    for (const Operation& one : round) {
      if (ok && one.what.kind == Kind::kRecv) ok = receive(one);
    }
    for (const Operation& one : round) {
      if (ok && one.what.kind == Kind::kSend) {
        ok = wait(memory_->messages[rank][one.peer()].taken, one.number);
      }
    }
    for (Copy& copy : copies) withdraw(std::move(copy), !ok);
    if (!ok) return false;
  }
  return true;
}

bool Communicator::send(const Operation& operation, Copy* copy) {
  CommunicatorMemory::Message& message = memory_->messages[rank][operation.peer()];
  if (!wait(message.taken, operation.number - 1)) return false;
  *copy = publish(message_name(name_, rank, operation.peer(), operation.number), operation.send,
                  operation.what.count * operation.element());
  message.operation = operation.what;
  message.operation.data = reinterpret_cast<std::uintptr_t>(copy->data);
  advance_to(message.posted, operation.number);
  return true;
}

bool Communicator::receive(const Operation& operation) {
  CommunicatorMemory::Message& message = memory_->messages[operation.peer()][rank];
  if (!wait(message.posted, operation.number)) return false;
  if (message.operation.count != operation.what.count ||
      message.operation.dtype != operation.what.dtype) {
    mismatch(operation.what, operation.peer(), message.operation);
    return false;
  }
  const std::size_t bytes = operation.what.count * operation.element();
  const std::string name = message_name(name_, operation.peer(), rank, operation.number);
  if (bytes > 0) std::memcpy(operation.receive, fetch(name, message.operation, bytes), bytes);
  if (operation.peer() != rank) release(name);
  advance_to(message.taken, operation.number);
  return true;
}

void Communicator::mismatch(const Posted& own, int other, const Posted& theirs) const {
  const std::string text = "ranks run different operations in a communicator: rank " +
                           std::to_string(rank) + ": " + describe(own) + "; rank " +
                           std::to_string(other) + ": " + describe(theirs);
  shared_->gpu.misuse(text.c_str());
}

Communicator::Copy Communicator::publish(const std::string& name, const void* from,
                                         std::size_t bytes) const {
  Copy copy;
  if (bytes == 0) return copy;
  if (shared_->named_memory.is_shared()) {
    copy.name = name;
    copy.data = shared_->named_memory.open(name, bytes);
  } else {
    copy.owned = std::make_unique<std::byte[]>(bytes);
    copy.data = copy.owned.get();
  }
  std::memcpy(copy.data, from, bytes);
  return copy;
}

const std::byte* Communicator::fetch(const std::string& name, const Posted& posted,
                                     std::size_t bytes) const {
  if (bytes == 0) return nullptr;
  if (shared_->named_memory.is_shared()) {
    return shared_->named_memory.open(name, bytes, /*create=*/false);
  }
  return std::bit_cast<const std::byte*>(static_cast<std::uintptr_t>(posted.data));
}

void Communicator::release(const std::string& name) const {
  if (shared_->named_memory.is_shared()) shared_->named_memory.close(name);
}

void Communicator::withdraw(Copy copy, bool in_use) const {
  if (shared_->named_memory.is_shared()) {
    if (copy.name.empty()) return;
    if (!in_use) shared_->named_memory.remove(copy.name);  // otherwise, others may still open it
    shared_->named_memory.close(copy.name);
  } else if (in_use) {
    const std::lock_guard lock(shared_->mutex);
    shared_->abandoned.push_back(std::move(copy.owned));
  }
}

}  // namespace horoplug::testing::simulated
