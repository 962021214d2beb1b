#include "engine/point_to_point.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <deque>
#include <utility>

#include "collectives/gpu/gpu_group.h"
#include "collectives/partition.h"

namespace horoplug {
namespace {

// In a transfer's Comm.
constexpr int kPeer = 1;
// Chunks that are queued on the links at a time.
constexpr std::size_t kWindow = 16;
constexpr std::size_t kWindowBytes = kWindow * Comm::kChunkBytes;

using Purpose = cuda::Workspace::Purpose;

// No plan has these epochs. The two directions between two ranks number their sends independently.
Channel channel_of(const Operation& operation, int source, int destination, std::uint64_t number) {
  Channel channel;
  channel.set = operation.members->set;
  channel.epoch = source < destination ? 0xFFFFFFFF : 0xFFFFFFFE;
  channel.batch = number;
  channel.check = number;
  return channel;
}

std::size_t bytes_of(const Operation& operation) {
  return static_cast<std::size_t>(payload_bytes(operation.signature));
}

Task send_data(Comm& comm, const std::byte* data, std::size_t bytes) {
  for (std::size_t i = 0; i < chunk_count(bytes, Comm::kChunkBytes); ++i) {
    const Part chunk = chunk_of({0, bytes}, i, Comm::kChunkBytes);
    comm.send(kPeer, data + chunk.begin, chunk.bytes);
    if (i % kWindow == kWindow - 1) co_await comm.flushed();
  }
  co_await comm.flushed();
}

Task receive_data(Comm& comm, std::byte* data, std::size_t bytes) {
  std::deque<Link::Receive> posted;
  const std::size_t chunks = chunk_count(bytes, Comm::kChunkBytes);
  std::size_t next = 0;
  for (std::size_t i = 0; i < chunks; ++i) {
    for (; next < chunks && next < i + kWindow; ++next) {
      const Part chunk = chunk_of({0, bytes}, next, Comm::kChunkBytes);
      comm.post(posted, kPeer, data + chunk.begin, chunk.bytes);
    }
    co_await posted.front();
    posted.pop_front();
  }
}

CUdeviceptr device_address(const std::byte* memory) { return std::bit_cast<CUdeviceptr>(memory); }

// Waits until the GPU has nothing to do: allocating the host's memory for it may block until then.
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

// In windows, each of which is in the host's memory at a time.
Task send_from_gpu(Comm& comm, const Operation& operation, cuda::Workspace& workspace,
                   bool is_first) {
  if (is_first) co_await DeviceIdle(workspace.device());
  std::byte* const host = workspace.on_host(Purpose::kInput, kWindowBytes);
  wait_for_framework(operation, workspace.stream());
  const CUdeviceptr from = device_address(operation.tensors.front().input);
  const std::size_t bytes = bytes_of(operation);
  for (std::size_t i = 0; i < chunk_count(bytes, kWindowBytes); ++i) {
    const Part window = chunk_of({0, bytes}, i, kWindowBytes);
    workspace.fetch(host, from + window.begin, window.bytes);
    co_await Passed(workspace.mark());
    co_await send_data(comm, host, window.bytes);
  }
}

Task receive_on_gpu(Comm& comm, const Operation& operation, cuda::Workspace& workspace,
                    bool is_first) {
  if (is_first) co_await DeviceIdle(workspace.device());
  std::byte* const host = workspace.on_host(Purpose::kOutput, kWindowBytes);
  wait_for_framework(operation, workspace.back());
  const CUdeviceptr to = device_address(operation.tensors.front().output);
  const std::size_t bytes = bytes_of(operation);
  for (std::size_t i = 0; i < chunk_count(bytes, kWindowBytes); ++i) {
    const Part window = chunk_of({0, bytes}, i, kWindowBytes);
    co_await receive_data(comm, host, window.bytes);
    workspace.bring(to + window.begin, host, window.bytes);
    co_await Passed(workspace.mark_back());
  }
}

// From a rank to itself.
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
  const bool from_gpu = from.signature.device >= 0, to_gpu = to.signature.device >= 0;
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
  if (operation.signature.op != OpKind::kReceive) return;
  TensorOutcome outcome;
  outcome.data = operation.tensors.front().output;
  outcome.bytes = payload_bytes(operation.signature);
  outcome.rows = rows_of(operation.signature.shapes.front());
  operation.outcomes.push_back(std::move(outcome));
}

}  // namespace

PointToPoint::PointToPoint(int rank, Mesh& mesh, std::function<void(Batch&)> on_start)
    : rank_(rank), mesh_(mesh), on_start_(std::move(on_start)), matcher_(rank) {}

PointToPoint::~PointToPoint() = default;

void PointToPoint::submit(const OperationPtr& operation) {
  const Signature& signature = operation->signature;
  const auto ticket = static_cast<std::uint64_t>(operation->handle);
  waiting_.emplace(ticket, operation);
  const PointToPointMatcher::Posting posting{ticket,          operation->members->set,
                                             signature.root,  operation->tag,
                                             signature.dtype, signature.shapes.front()};
  if (signature.op == OpKind::kSend) {
    matcher_.send(posting);
  } else {
    matcher_.receive(posting);
  }
}

void PointToPoint::receive(int from, const MessageHead& head, Reader& reader) {
  switch (head.kind) {
    case MessageKind::kOffer:
      return matcher_.receive_offer(from, head.set, decode_offer(reader));
    case MessageKind::kAccept:
      return matcher_.receive_accept(from, decode_accept(reader));
    case MessageKind::kReject:
      return matcher_.receive_reject(from, decode_refusal(reader));
    default:
      return matcher_.receive_cancel(from, head.set, decode_refusal(reader));
  }
}

void PointToPoint::refuse(int from, std::uint32_t set, Reader& reader, const Status& status) {
  const Offer offer = decode_offer(reader);
  mesh_.send_control(
      from, encode(MessageKind::kReject, set, Refusal{offer.send, status.code, status.message}));
}

OperationPtr PointToPoint::take_waiting(std::uint64_t ticket) {
  const auto found = waiting_.find(ticket);
  if (found == waiting_.end()) return nullptr;
  OperationPtr operation = std::move(found->second);
  waiting_.erase(found);
  return operation;
}

void PointToPoint::handle(const PointToPointMatcher::Event& event) {
  using Kind = PointToPointMatcher::Event::Kind;
  OperationPtr operation = take_waiting(event.ticket);
  if (event.kind != Kind::kFail) {
    transfers_.push_back(
        {.operation = std::move(operation),
         .partner = event.kind == Kind::kCopy ? take_waiting(event.partner) : nullptr,
         .peer = event.kind == Kind::kCopy ? rank_ : event.peer,
         .number = event.transfer});
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

bool PointToPoint::advance(bool gpu_may_run) {
  bool busy = false;
  for (auto& message : matcher_.take_outgoing()) {
    mesh_.send_control(message.to, std::move(message.bytes));
    busy = true;
  }
  for (const auto& event : matcher_.take_events()) {
    handle(event);
    busy = true;
  }
  for (auto it = transfers_.begin(); it != transfers_.end();) {
    Transfer& transfer = *it;
    const bool waits = transfer.on_gpu() && !gpu_may_run;
    if (waits || (!transfer.fiber && !may_begin(transfer))) {
      ++it;
      continue;
    }
    if (!transfer.fiber) {
      begin(transfer);
      busy = true;
    }
    const bool done = transfer.fiber->poll();
    busy |= transfer.fiber->advanced();
    if (!done) {
      ++it;
      continue;
    }
    end(transfer, {});
    it = transfers_.erase(it);
    busy = true;
  }
  return busy;
}

// Those on GPUs share memory of the host: one at a time in each direction. What comes meanwhile
// keeps, so that no peer waits for that.
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
    trace->begin_transfer(transfer.partner ? "self" : "stream",
                          op_kind_name(transfer.operation->signature.op),
                          bytes_of(*transfer.operation));
  }
  if (!transfer.partner) {
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
  if (transfer.partner) {
    const bool from_gpu = operation.signature.device >= 0;
    return copy_to_self(
        operation, *transfer.partner,
        transfer.on_gpu() ? &workspace(from_gpu ? operation : *transfer.partner) : nullptr);
  }
  Comm& comm = *transfer.comm;
  const bool is_first =
      transfer.on_gpu() && !std::exchange(has_host_memory_[transfer.sends() ? 0 : 1], true);
  const TensorArgument& tensor = operation.tensors.front();
  if (transfer.sends()) {
    return transfer.on_gpu() ? send_from_gpu(comm, operation, workspace(operation), is_first)
                             : send_data(comm, tensor.input, bytes_of(operation));
  }
  return transfer.on_gpu() ? receive_on_gpu(comm, operation, workspace(operation), is_first)
                           : receive_data(comm, tensor.output, bytes_of(operation));
}

void PointToPoint::end(Transfer& transfer, const Status& status) {
  transfer.fiber.reset();
  if (transfer.comm) transfer.comm->end();
  if (transfer.batch.trace) {
    transfer.batch.trace->end_transfer();
    transfer.batch.trace->end();
  }
  if (!transfer.sends()) matcher_.received(static_cast<std::uint64_t>(transfer.operation->handle));
  for (const OperationPtr& operation : {transfer.operation, transfer.partner}) {
    if (!operation) continue;
    if (status.ok()) set_outcome(*operation);
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

std::string PointToPoint::describe_oldest() const {
  return transfers_.front().operation->describe();
}

std::vector<int> PointToPoint::peers() const {
  std::vector<int> ranks;
  for (const Transfer& transfer : transfers_) {
    if (transfer.peer != rank_) ranks.push_back(transfer.peer);
  }
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
