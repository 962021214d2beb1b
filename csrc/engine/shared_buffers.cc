// How buffers that ranks share come, and how operations find that they work in one. A buffer is
// made by an operation on all ranks, so that every rank numbers and places it alike; it ends on
// each rank by itself, with its last user there.
#include <unistd.h>

#include "engine/engine.h"
#include "engine/submission.h"

namespace horoplug {
namespace {

constexpr std::uint64_t kMaxBytes = std::uint64_t{1} << 46;
constexpr std::size_t kPage = 4096;

bool can_be_in_place(const Signature& signature) {
  return signature.op == OpKind::kAllreduce && signature.reduce != ReduceOp::kAdasum;
}

}  // namespace

// ---- called by any thread ----

hp_handle Engine::create_buffer(std::uint64_t bytes) {
  if (bytes == 0 || bytes > kMaxBytes) {
    throw Error(HP_INVALID_ARGUMENT, "a buffer of " + std::to_string(bytes) + " bytes");
  }
  return submit(
      make_administrative(OpKind::kAddBuffer, members(0), {static_cast<std::int64_t>(bytes)}));
}

// Under the lock. The buffer in which all tensors of an operation lie; nullptr if there is none, or
// the operation cannot make use of it.
std::shared_ptr<SharedBuffer> Engine::buffer_of(const Operation& operation) {
  if (buffers_.empty() || !can_be_in_place(operation.signature)) return nullptr;
  std::shared_ptr<SharedBuffer> buffer;
  for (std::size_t i = 0; i < operation.tensors.size(); ++i) {
    const TensorArgument& tensor = operation.tensors[i];
    if (tensor.input != tensor.output) return nullptr;
    if (!buffer) {
      auto after = buffers_.upper_bound(tensor.input);
      if (after == buffers_.begin()) return nullptr;
      buffer = std::prev(after)->second.lock();
    }
    const auto bytes = static_cast<std::size_t>(elements_of(operation.signature.shapes[i])) *
                       dtype_size(operation.signature.dtype);
    if (!buffer || !buffer->contains(tensor.input, bytes)) return nullptr;
  }
  return buffer;
}

// ---- the progress thread ----

std::size_t Engine::reserve(int rank, std::size_t bytes) {
  std::size_t& end = segment_ends_[static_cast<std::size_t>(rank)];
  return std::exchange(end, end + (bytes + kPage - 1) / kPage * kPage);
}

void Engine::add_buffer(const OperationPtr& operation) {
  const auto bytes = static_cast<std::size_t>(operation->signature.shapes.front().front());
  const std::uint32_t number = ++last_buffer_;
  const Member& self = config_.members[static_cast<std::size_t>(config_.rank)];
  bool together = size() > 1;
  for (const Member& member : config_.members) {
    together = together && member.host == self.host && member.segment_file;
  }
  std::vector<Segment> parts;
  std::size_t own_place = 0;
  Fd own_file;
  for (int rank = 0; together && rank < size(); ++rank) {
    const Fd& file = config_.members[static_cast<std::size_t>(rank)].segment_file;
    const std::size_t place = reserve(rank, bytes);
    Segment::extend(file, place + bytes);
    parts.push_back(Segment::map(file, bytes, place));
    if (rank == config_.rank) {
      own_place = place;
      own_file = Fd(::dup(file.get()));
    }
  }
  if (parts.empty()) parts.push_back(Segment::allocate(bytes));
  operation->buffer = std::make_shared<SharedBuffer>(number, config_.rank, std::move(parts),
                                                     std::move(own_file), own_place);
  operation->value = number;
  {
    std::lock_guard lock(mutex_);
    std::erase_if(buffers_, [](const auto& entry) { return entry.second.expired(); });
    buffers_[operation->buffer->data()] = operation->buffer;
  }
  end_operations({operation}, {});
}

}  // namespace horoplug
