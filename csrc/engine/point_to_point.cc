#include "engine/point_to_point.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <span>
#include <utility>

#include "collectives/gpu/gpu_group.h"
#include "collectives/partition.h"

namespace horoplug {
namespace {

using Purpose = cuda::Workspace::Purpose;

// The two directions between two ranks number their sends independently.
Channel channel_of(const Operation& operation, int source, int destination, std::uint64_t number) {
  Channel channel;
  channel.set = operation.members->set;
  using Traffic = Channel::Traffic;
  channel.traffic = source < destination ? Traffic::kUpwards : Traffic::kDownwards;
  channel.batch = number;
  channel.check = number;
  return channel;
}

std::size_t bytes_of(const Operation& operation) {
  return static_cast<std::size_t>(operation.identity->bytes);
}

CUdeviceptr device_address(const std::byte* memory) { return std::bit_cast<CUdeviceptr>(memory); }

// Waits until the GPU has nothing to do: allocating the CPU's memory for it may block until then.
class DeviceIdle final : public Waitable {
 public:
  explicit DeviceIdle(cuda::Device& device) : device_(device) {}
  bool ready() override { return device_.idle(); }
  void blame(std::vector<int>&) const override {}
  bool polled() const override { return true; }

 private:
  cuda::Device& device_;
};

void wait_for_framework(const Operation& operation, const cuda::Stream& stream) {
  if (operation.gpu.ready) stream.wait_for(operation.gpu.ready->handle());
}

// In windows, each of which is in the CPU's memory at a time.
Task send_from_gpu(Comm& comm, const Operation& operation, cuda::Workspace& workspace,
                   bool is_first) {
  if (is_first) co_await DeviceIdle(workspace.device());
  std::byte* const host = workspace.pinned(Purpose::kInput, kStreamWindowBytes);
  wait_for_framework(operation, workspace.stream());
  const CUdeviceptr from = device_address(operation.tensors.front().input);
  const std::size_t bytes = bytes_of(operation);
  for (std::size_t i = 0; i < chunk_count(bytes, kStreamWindowBytes); ++i) {
    const Part window = chunk_of({0, bytes}, i, kStreamWindowBytes);
    workspace.fetch(host, from + window.begin, window.bytes);
    co_await Passed(workspace.mark());
    co_await send_stream(comm, host, window.bytes);
  }
}

Task receive_on_gpu(Comm& comm, const Operation& operation, cuda::Workspace& workspace,
                    bool is_first) {
  if (is_first) co_await DeviceIdle(workspace.device());
  std::byte* const host = workspace.pinned(Purpose::kOutput, kStreamWindowBytes);
  wait_for_framework(operation, workspace.back());
  const CUdeviceptr to = device_address(operation.tensors.front().output);
  const std::size_t bytes = bytes_of(operation);
  for (std::size_t i = 0; i < chunk_count(bytes, kStreamWindowBytes); ++i) {
    const Part window = chunk_of({0, bytes}, i, kStreamWindowBytes);
    co_await receive_stream(comm, host, window.bytes);
    workspace.bring(to + window.begin, host, window.bytes);
    co_await Passed(workspace.mark_back());
  }
}

// Copies the tensor that came with the offer to a tensor on a GPU.
Task deliver_to_gpu(std::span<const std::byte> data, const Operation& operation,
                    cuda::Workspace& workspace, bool is_first) {
  if (is_first) co_await DeviceIdle(workspace.device());
  std::byte* const host = workspace.pinned(Purpose::kOutput, kStreamWindowBytes);
  wait_for_framework(operation, workspace.back());
  if (!data.empty()) {
    std::memcpy(host, data.data(), data.size());
    workspace.bring(device_address(operation.tensors.front().output), host, data.size());
  }
  co_await Passed(workspace.mark_back());
}

// The same for a tensor in the CPU's memory.
Task deliver(std::span<const std::byte> data, const Operation& operation) {
  if (!data.empty()) std::memcpy(operation.tensors.front().output, data.data(), data.size());
  co_return;
}

// The offer has carried the tensor: the sender has nothing left to do.
Task nothing() { co_return; }

// A send of a rank to itself: one copy from its tensor to that of the recv.
Task copy_to_self(const Operation& from, const Operation& to, cuda::Workspace* workspace) {
  const std::byte* const input = from.tensors.front().input;
  std::byte* const output = to.tensors.front().output;
  const std::size_t bytes = bytes_of(from);
  if (workspace == nullptr) {
    if (bytes > 0) std::memmove(output, input, bytes);
    co_return;
  }
  for (const cuda::Stream* stream : {&workspace->stream(), &workspace->back()}) {
    wait_for_framework(from, *stream);
    wait_for_framework(to, *stream);
  }
  const bool from_gpu = from.signature().device >= 0, to_gpu = to.signature().device >= 0;
  if (from_gpu && to_gpu) {
    workspace->copy(device_address(output), device_address(input), bytes);
  } else if (from_gpu) {
    workspace->fetch(output, device_address(input), bytes);
  } else {
    workspace->bring(device_address(output), input, bytes);
  }
  co_await Passed(workspace->mark());
  co_await Passed(workspace->mark_back());
}

void set_outcome(Operation& operation) {
  if (operation.signature().op != OpKind::kReceive) return;
  TensorOutcome outcome;
  outcome.data = operation.tensors.front().output;
  outcome.bytes = operation.identity->bytes;
  outcome.rows = rows_of(operation.signature().shapes.front());
  operation.outcomes.push_back(std::move(outcome));
}

}  // namespace

PointToPoint::PointToPoint(const EngineConfig& config, Mesh& mesh,
                           std::function<void(Batch&)> on_start)
    : config_(config),
      rank_(config.rank),
      mesh_(mesh),
      on_start_(std::move(on_start)),
      matcher_(config.rank) {}

PointToPoint::~PointToPoint() = default;

void PointToPoint::submit(const OperationPtr& operation) {
  const Signature& signature = operation->signature();
  const auto ticket = static_cast<std::uint64_t>(operation->handle);
  waiting_.emplace(ticket, operation);
  const PointToPointMatcher::Posting posting{ticket,          operation->members->set,
                                             signature.root,  operation->tag,
                                             signature.dtype, signature.shapes.front()};
  if (signature.op == OpKind::kReceive) {
    matcher_.receive(posting);
    if (posting.peer == PointToPointMatcher::kAnyRank) fail_recvs_without_sender();
    return;
  }
  TransferProperties properties = properties_of(*operation);
  properties.unanswered = matcher_.unanswered_bytes(signature.root);
  if (fits_into_offer(properties)) {
    const std::byte* const data = operation->tensors.front().input;
    return matcher_.send(posting, Offer::Source::kInline, Bytes(data, data + properties.bytes));
  }
  matcher_.send(posting, properties.on_gpu ? Offer::Source::kGpu : Offer::Source::kCpu);
}

void PointToPoint::receive(int from, const MessageHead& head, Reader& reader) {
  switch (head.kind) {
    case MessageKind::kOffer:
      return matcher_.receive_offer(from, head.set, decode<Offer>(reader));
    case MessageKind::kAccept: {
      Accept accept = decode<Accept>(reader);
      const bool known = std::all_of(accept.slots.begin(), accept.slots.end(),
                                     [](auto slot) { return slot < TransferSlots::kSlots; });
      if (!known || (!accept.slots.empty() && !shares_memory_with(from))) {
        throw WireError("slots that do not exist");
      }
      return matcher_.receive_accept(from, std::move(accept));
    }
    case MessageKind::kReject:
      return matcher_.receive_reject(from, decode<Refusal>(reader));
    default:
      return matcher_.receive_cancel(from, head.set, decode<Refusal>(reader));
  }
}

void PointToPoint::refuse(int from, std::uint32_t set, Reader& reader, const Status& status) {
  const Offer offer = decode<Offer>(reader);
  mesh_.send_control(
      from, encode(MessageKind::kReject, set, Refusal{offer.send, status.code, status.message}));
}

void PointToPoint::depart(int peer) {
  matcher_.depart(peer, {HP_SHUT_DOWN, "rank " + std::to_string(peer) +
                                           " has shut down or its program has ended"});
  fail_recvs_without_sender();
}

// A recv from any rank waits for nobody once all other ranks of its set have left.
void PointToPoint::fail_recvs_without_sender() {
  const auto has_departed = [this](int rank) {
    return rank == rank_ || matcher_.has_departed(rank);
  };
  for (const auto& [ticket, operation] : waiting_) {
    const std::vector<int>& ranks = operation->members->ranks;
    if (operation->signature().root != PointToPointMatcher::kAnyRank || ranks.size() == 1) continue;
    if (!std::all_of(ranks.begin(), ranks.end(), has_departed)) continue;
    matcher_.fail_recvs_from_any(
        operation->members->set,
        {HP_SHUT_DOWN, "all other ranks have shut down or their programs have ended"});
  }
}

OperationPtr PointToPoint::take_waiting(std::uint64_t ticket) {
  const auto found = waiting_.find(ticket);
  if (found == waiting_.end()) return nullptr;
  OperationPtr operation = std::move(found->second);
  waiting_.erase(found);
  operation->decided = true;
  return operation;
}

void PointToPoint::handle(PointToPointMatcher::Event& event) {
  using Kind = PointToPointMatcher::Event::Kind;
  OperationPtr operation = take_waiting(event.ticket);
  if (event.kind != Kind::kFail) {
    Transfer& transfer = transfers_.emplace_back(Transfer{.operation = std::move(operation),
                                                          .partner = nullptr,
                                                          .peer = event.peer,
                                                          .number = event.transfer});
    switch (event.kind) {
      case Kind::kCopy:
        transfer.partner = take_waiting(event.partner);
        transfer.peer = rank_;
        transfer.path = &kCopyPath;
        break;
      case Kind::kSent:
        transfer.path = &kInlinePath;
        break;
      case Kind::kDeliver:
        transfer.data = std::move(event.data);
        transfer.path = &kInlinePath;
        break;
      case Kind::kSend:
        transfer.path = event.slots.empty() ? &kStreamPath : &kDirectPath;
        if (!event.slots.empty()) {
          transfer.loan = make_loan(transfer.peer, transfer.peer, std::move(event.slots));
        }
        break;
      default:
        transfer.source = event.source;
    }
    return;
  }
  if (operation != nullptr) {
    ended_.push_back({std::move(operation), event.status});
    return;
  }
  // The sender has withdrawn what a recv had accepted.
  const auto started = std::find_if(transfers_.begin(), transfers_.end(), [&](const Transfer& t) {
    return static_cast<std::uint64_t>(t.operation->handle) == event.ticket;
  });
  if (started == transfers_.end()) return;
  end(*started, event.status);
  transfers_.erase(started);
}

bool PointToPoint::shares_memory_with(int peer) const {
  const Member& mine = config_.members[rank_];
  const Member& other = config_.members[peer];
  return mine.host == other.host && mine.segment && other.segment;
}

// Of the transfer of one of this rank's operations. The peer's tensor may be on a GPU nevertheless.
TransferProperties PointToPoint::properties_of(const Operation& operation) const {
  return properties_of(operation, operation.signature().root);
}

TransferProperties PointToPoint::properties_of(const Operation& operation, int peer) const {
  return {.bytes = bytes_of(operation),
          .to_itself = peer == rank_,
          .shares_memory = shares_memory_with(peer),
          .on_gpu = operation.signature().device >= 0,
          .forced = config_.options.algorithm};
}

// `owner`: the rank in whose segment the slots are. `peer`: the rank at the other end.
std::unique_ptr<SlotLoan> PointToPoint::make_loan(int owner, int peer,
                                                  std::vector<std::uint32_t> slots) const {
  return std::make_unique<SlotLoan>(TransferSlots(*config_.members[owner].segment),
                                    std::move(slots), peer, config_.members[peer].doorbell);
}

// Chooses the path of a recv and lets its sender begin, unless there is no slot for it. Transfers
// that have slots give them back without the programs of the two ranks.
bool PointToPoint::accept(Transfer& transfer) {
  TransferProperties properties = properties_of(*transfer.operation, transfer.peer);
  properties.on_gpu |= transfer.source == Offer::Source::kGpu;
  const TransferPath& path = choose_path(properties);
  std::vector<std::uint32_t> slots;
  if (&path == &kDirectPath) {
    slots = slots_.take(slots_wanted(properties.bytes));
    if (slots.empty()) return false;
    transfer.loan = make_loan(rank_, transfer.peer, slots);
    transfer.loan->begin();
  }
  transfer.path = &path;
  matcher_.accept(transfer.peer, transfer.number, std::move(slots));
  return true;
}

bool PointToPoint::send_messages() {
  auto messages = matcher_.take_outgoing();
  for (auto& message : messages) mesh_.send_control(message.to, std::move(message.bytes));
  return !messages.empty();
}

bool PointToPoint::advance(bool gpu_may_run) {
  bool busy = false;
  for (auto& event : matcher_.take_events()) {
    handle(event);
    busy = true;
  }
  // Slots that become free below are for the transfers that have waited for longest.
  for (Transfer& transfer : transfers_) {
    if (transfer.path == nullptr) busy |= accept(transfer);
  }
  for (auto it = transfers_.begin(); it != transfers_.end();) {
    Transfer& transfer = *it;
    const bool waits = transfer.on_gpu() && !gpu_may_run;
    if (transfer.path == nullptr || waits || (!transfer.fiber && !may_begin(transfer))) {
      ++it;
      continue;
    }
    if (!transfer.fiber) {
      begin(transfer);
      busy = true;
    }
    const bool done = transfer.fiber->poll();
    transfer.advanced |= transfer.fiber->advanced();
    busy |= transfer.fiber->advanced();
    if (!done) {
      ++it;
      continue;
    }
    end(transfer, {});
    it = transfers_.erase(it);
    busy = true;
  }
  return send_messages() || busy;
}

// Transfers on GPUs share one buffer of the CPU's memory for each direction, so that one runs at a
// time. Frames that arrive for the others are kept: no peer waits.
bool PointToPoint::may_begin(const Transfer& transfer) const {
  if (!transfer.on_gpu()) return true;
  return std::none_of(transfers_.begin(), transfers_.end(), [&](const Transfer& other) {
    return other.fiber && other.on_gpu() && other.sends() == transfer.sends();
  });
}

cuda::Workspace& PointToPoint::workspace(const Operation& operation) {
  if (!workspace_) workspace_ = std::make_unique<cuda::Workspace>(operation.gpu.device);
  return *workspace_;
}

void PointToPoint::begin(Transfer& transfer) {
  transfer.batch.number = transfer.number;
  transfer.batch.operations = {transfer.operation};
  if (transfer.partner) transfer.batch.operations.push_back(transfer.partner);
  on_start_(transfer.batch);
  BatchTrace* const trace = transfer.batch.trace.get();
  if (trace != nullptr) {
    trace->start();
    trace->begin_transfer(transfer.path->medium, op_kind_name(transfer.operation->signature().op),
                          bytes_of(*transfer.operation));
  }
  if (transfer.path == &kStreamPath) {
    std::vector<std::vector<Link*>> lanes{{}, mesh_.data_lanes(transfer.peer)};
    transfer.comm = std::make_unique<Comm>(0, std::move(lanes), nullptr);
    const int source = transfer.sends() ? rank_ : transfer.peer;
    const int destination = transfer.sends() ? transfer.peer : rank_;
    transfer.comm->begin(channel_of(*transfer.operation, source, destination, transfer.number));
  }
  transfer.fiber = std::make_unique<Fiber>(run(transfer));
}

Task PointToPoint::run(Transfer& transfer) {
  const Operation& operation = *transfer.operation;
  if (transfer.path == &kInlinePath && transfer.sends()) return nothing();
  if (transfer.on_gpu()) return run_on_gpu(transfer);
  const TensorArgument& tensor = operation.tensors.front();
  const std::size_t bytes = bytes_of(operation);
  if (transfer.path == &kCopyPath) return copy_to_self(operation, *transfer.partner, nullptr);
  if (transfer.path == &kInlinePath) return deliver(transfer.data, operation);
  if (transfer.path == &kDirectPath) {
    return transfer.sends() ? send_direct(*transfer.loan, tensor.input, bytes)
                            : receive_direct(*transfer.loan, tensor.output, bytes);
  }
  return transfer.sends() ? send_stream(*transfer.comm, tensor.input, bytes)
                          : receive_stream(*transfer.comm, tensor.output, bytes);
}

Task PointToPoint::run_on_gpu(Transfer& transfer) {
  const Operation& operation = *transfer.operation;
  if (transfer.path == &kCopyPath) {
    const bool from_gpu = operation.signature().device >= 0;
    return copy_to_self(operation, *transfer.partner,
                        &workspace(from_gpu ? operation : *transfer.partner));
  }
  const bool is_first = !std::exchange(has_pinned_memory_[transfer.sends() ? 0 : 1], true);
  cuda::Workspace& memory = workspace(operation);
  if (transfer.path == &kInlinePath) {
    return deliver_to_gpu(transfer.data, operation, memory, is_first);
  }
  return transfer.sends() ? send_from_gpu(*transfer.comm, operation, memory, is_first)
                          : receive_on_gpu(*transfer.comm, operation, memory, is_first);
}

void PointToPoint::end(Transfer& transfer, const Status& status) {
  transfer.fiber.reset();
  if (transfer.comm) transfer.comm->end();
  if (transfer.loan && !transfer.sends()) slots_.give_back(transfer.loan->slots());
  if (transfer.batch.trace) {
    transfer.batch.trace->end_transfer();
    transfer.batch.trace->end();
  }
  if (!transfer.sends()) matcher_.received(static_cast<std::uint64_t>(transfer.operation->handle));
  for (const OperationPtr& operation : {transfer.operation, transfer.partner}) {
    if (!operation) continue;
    const bool receives = operation->signature().op == OpKind::kReceive;
    if (status.ok()) set_outcome(*operation);
    if (receives) operation->value = transfer.peer;
    ended_.push_back({operation, status});
  }
}

bool PointToPoint::has_transfers(std::uint32_t set) const {
  return std::any_of(transfers_.begin(), transfers_.end(), [&](const Transfer& transfer) {
    return transfer.operation->members->set == set;
  });
}

bool PointToPoint::polled() const {
  return std::any_of(transfers_.begin(), transfers_.end(), [](const Transfer& transfer) {
    return transfer.fiber && transfer.fiber->polled();
  });
}

bool PointToPoint::on_gpu() const {
  return std::any_of(transfers_.begin(), transfers_.end(),
                     [](const Transfer& transfer) { return transfer.on_gpu(); });
}

void PointToPoint::note_progress(RunningTime now, const std::vector<bool>& moved) {
  for (Transfer& transfer : transfers_) {
    const bool makes_progress = std::exchange(transfer.advanced, false) || !transfer.fiber ||
                                moved[static_cast<std::size_t>(transfer.peer)];
    if (makes_progress) transfer.last_progress = now;
  }
}

std::optional<PointToPoint::Standstill> PointToPoint::longest_standstill() const {
  const Transfer* longest = nullptr;
  for (const Transfer& transfer : transfers_) {
    if (!transfer.fiber || transfer.advanced) continue;
    if (!longest || transfer.last_progress < longest->last_progress) longest = &transfer;
  }
  if (longest == nullptr) return std::nullopt;
  return Standstill{*longest->operation, longest->peer, longest->last_progress};
}

std::vector<int> PointToPoint::peers() const {
  std::vector<int> ranks;
  for (const Transfer& transfer : transfers_) {
    if (transfer.peer != rank_) ranks.push_back(transfer.peer);
  }
  // A rank can be the peer of several transfers.
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

std::vector<OperationPtr> PointToPoint::take_all() {
  std::vector<OperationPtr> operations;
  for (Transfer& transfer : transfers_) {
    if (transfer.batch.trace) transfer.batch.trace->end();
    // The memory of a tensor is not read any more.
    transfer.fiber.reset();
    if (transfer.comm) transfer.comm->withdraw();
    operations.push_back(transfer.operation);
    if (transfer.partner) operations.push_back(transfer.partner);
  }
  transfers_.clear();
  for (auto& [ticket, operation] : std::exchange(waiting_, {})) {
    operations.push_back(std::move(operation));
  }
  for (Ended& ended : std::exchange(ended_, {})) operations.push_back(std::move(ended.operation));
  return operations;
}

}  // namespace horoplug
