#include "device/cuda/runtime/ipc_peers.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/status.h"

namespace horoplug::cuda {
namespace {

// A value this far ahead releases every wait: half the range of a cyclic comparison.
constexpr std::uint32_t kFarAhead = 1U << 30;

}  // namespace

IpcPeers::IpcPeers(std::shared_ptr<Device> device, int rank, int size, std::byte* page)
    : device_(std::move(device)),
      rank_(rank),
      size_(size),
      page_(page),
      buffers_(static_cast<std::size_t>(size)) {
  allocate();
  const Context& context = device_->context();
  const Current current(context);
  context.check(context.api().MemHostRegister(page_, kPageBytes, kHostPortable | kHostMapped),
                "cuMemHostRegister");
  const CUresult result = context.api().MemHostGetDevicePointer(&page_on_device_, page_, 0);
  if (result == kSuccess) return;
  context.api().MemHostUnregister(page_);
  context.check(result, "cuMemHostGetDevicePointer");
}

IpcPeers::~IpcPeers() {
  close();
  const Context& context = device_->context();
  if (context.api().CtxPushCurrent(context.handle()) != kSuccess) return;  // the GPU has failed
  context.api().MemHostUnregister(page_);
  CUcontext popped = nullptr;
  context.api().CtxPopCurrent(&popped);
}

void IpcPeers::close() noexcept {
  const Context& context = device_->context();
  if (context.api().CtxPushCurrent(context.handle()) != kSuccess) return;
  for (int rank = 0; rank < size_; ++rank) {
    CUdeviceptr& buffer = buffers_[static_cast<std::size_t>(rank)];
    if (rank != rank_ && buffer != 0) context.api().IpcCloseMemHandle(std::exchange(buffer, 0));
  }
  CUcontext popped = nullptr;
  context.api().CtxPopCurrent(&popped);
}

// Limited by the free memory.
void IpcPeers::allocate() {
  for (half_bytes_ = kMostBytes; !own_; half_bytes_ /= 2) {
    try {
      own_ = std::make_unique<DeviceMemory>(device_->context(), 2 * half_bytes_);
      break;
    } catch (const Error&) {
      if (half_bytes_ <= kLeastBytes) throw;
    }
  }
  buffers_[static_cast<std::size_t>(rank_)] = own_->address();
}

IpcPeers::Offer IpcPeers::offer() const {
  const Context& context = device_->context();
  const Current current(context);
  Offer offer{};
  context.check(context.api().IpcGetMemHandle(&offer.buffer, own_->address()), "cuIpcGetMemHandle");
  offer.half_bytes = half_bytes_;
  return offer;
}

void IpcPeers::open(std::span<const Offer> offers) {
  const Context& context = device_->context();
  const Current current(context);
  for (int rank = 0; rank < size_; ++rank) {
    const Offer& offer = offers[static_cast<std::size_t>(rank)];
    half_bytes_ = std::min<std::size_t>(half_bytes_, offer.half_bytes);
    if (rank == rank_) continue;
    context.check(context.api().IpcOpenMemHandle(&buffers_[static_cast<std::size_t>(rank)],
                                                 offer.buffer, kIpcLazyPeerAccess),
                  "cuIpcOpenMemHandle of rank " + std::to_string(rank) + "'s memory");
  }
}

CUdeviceptr IpcPeers::half(int rank) const {
  return buffers_[static_cast<std::size_t>(rank)] + round_ % 2 * half_bytes_;
}

std::atomic_ref<std::uint32_t> IpcPeers::word(int rank) const {
  return std::atomic_ref(*reinterpret_cast<std::uint32_t*>(page_ + rank * kLine));
}

CUdeviceptr IpcPeers::word_on_device(int rank) const {
  return page_on_device_ + static_cast<std::size_t>(rank) * kLine;
}

// This rank's earlier work in the stream is visible to all ranks before the word is.
void IpcPeers::barrier(CUstream stream) {
  const Context& context = device_->context();
  const Current current(context);
  ++barrier_;
  context.check(context.api().StreamWriteValue32(stream, word_on_device(rank_), barrier_, 0),
                "cuStreamWriteValue32");
  for (int step = 1; step < size_; ++step) {
    const CUdeviceptr other = word_on_device((rank_ + step) % size_);
    context.check(context.api().StreamWaitValue32(stream, other, barrier_, kWaitAtLeast),
                  "cuStreamWaitValue32");
  }
}

bool IpcPeers::all_have_reached(std::uint32_t barrier) const {
  for (int rank = 0; rank < size_; ++rank) {
    const std::uint32_t at = word(rank).load(std::memory_order_acquire);
    if (static_cast<std::int32_t>(at - barrier) < 0) return false;
  }
  return true;
}

// The ranks have one further barrier, for which their threads wait and no GPU.
bool IpcPeers::closed_by_all(CUstream stream) {
  if (closing_ == Closing::kNotBegun) {
    last_ = device_->mark(stream);
    closing_ = Closing::kWaitsForStream;
  }
  if (closing_ == Closing::kWaitsForStream) {
    if (!last_->done()) return false;
    close();
    word(rank_).store(++barrier_, std::memory_order_release);
    closing_ = Closing::kClosed;
  }
  return all_have_reached(barrier_);
}

void IpcPeers::release() noexcept {
  for (int rank = 0; rank < size_; ++rank) {
    word(rank).store(barrier_ + kFarAhead, std::memory_order_release);
  }
}

}  // namespace horoplug::cuda
