#include "engine/shared_buffers.h"

#include <unistd.h>

namespace horoplug {
namespace {

constexpr std::uint64_t kMaxBytes = std::uint64_t{1} << 46;

bool can_be_in_place(const Signature& signature) {
  return signature.op == OpKind::kAllreduce && signature.reduce != ReduceOp::kAdasum;
}

}  // namespace

void SharedBuffers::check_size(std::uint64_t bytes) {
  if (bytes == 0 || bytes > kMaxBytes) {
    throw Error(HP_INVALID_ARGUMENT,
                "a shared buffer cannot have " + std::to_string(bytes) + " bytes");
  }
}

std::shared_ptr<SharedBuffer> SharedBuffers::find(const Operation& operation) const {
  if (!any_.load(std::memory_order_acquire) || !can_be_in_place(operation.signature())) {
    return nullptr;
  }
  std::lock_guard lock(mutex_);
  std::shared_ptr<SharedBuffer> buffer;
  for (std::size_t i = 0; i < operation.tensors.size(); ++i) {
    const TensorArgument& tensor = operation.tensors[i];
    if (tensor.input != tensor.output) return nullptr;
    if (!buffer) {
      const auto after = buffers_.upper_bound(tensor.input);
      if (after == buffers_.begin()) return nullptr;
      buffer = std::prev(after)->second.lock();
    }
    const auto bytes = static_cast<std::size_t>(elements_of(operation.signature().shapes[i])) *
                       dtype_size(operation.signature().dtype);
    if (!buffer || !buffer->contains(tensor.input, bytes)) return nullptr;
  }
  return buffer;
}

void SharedBuffers::create(Operation& operation) {
  const auto bytes = static_cast<std::size_t>(operation.signature().shapes.front().front());
  const std::uint32_t number = ++last_number_;
  const Member& self = config_.self();
  bool shared = config_.size() > 1;
  for (const Member& member : config_.members) {
    shared = shared && member.host == self.host && member.segment_file;
  }
  std::vector<Segment> parts;
  std::size_t own_offset = 0;
  Fd own_file;
  for (int rank = 0; shared && rank < config_.size(); ++rank) {
    const Fd& file = config_.members[rank].segment_file;
    const std::size_t offset = segments_.reserve(rank, bytes).offset;
    Segment::extend(file, offset + bytes);
    parts.push_back(Segment::map(file, bytes, offset));
    if (rank == config_.rank) {
      own_offset = offset;
      own_file = Fd(::dup(file.get()));
    }
  }
  if (parts.empty()) parts.push_back(Segment::allocate(bytes));
  operation.buffer = std::make_shared<SharedBuffer>(number, config_.rank, std::move(parts),
                                                    std::move(own_file), own_offset);
  operation.value = number;
  std::lock_guard lock(mutex_);
  std::erase_if(buffers_, [](const auto& entry) { return entry.second.expired(); });
  buffers_[operation.buffer->data()] = operation.buffer;
  any_.store(true, std::memory_order_release);
}

}  // namespace horoplug
