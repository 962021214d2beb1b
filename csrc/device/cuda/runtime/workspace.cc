#include "device/cuda/runtime/workspace.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "base/status.h"

namespace horoplug::cuda {
namespace {

// Growth by powers of two needs few allocations. If that exceeds the free memory, it grows by the
// minimum.
template <typename Memory, typename Make>
void grow(std::unique_ptr<Memory>& memory, std::size_t bytes, Make&& make) {
  constexpr std::size_t kLeast = 1 << 20;
  const std::size_t rounded = std::max(kLeast, std::bit_ceil(bytes));
  try {
    memory = make(rounded);
  } catch (const Error&) {
    if (rounded == bytes) throw;
    memory = make(bytes);
  }
}

// Likewise, for memory whose release would block the calling thread, unless it is large enough.
template <typename Memory, typename Make>
Memory& enough(std::unique_ptr<Memory>& memory, std::vector<std::unique_ptr<Memory>>& outgrown,
               std::size_t bytes, Make&& make) {
  if (!memory || memory->bytes() < bytes) {
    if (memory) outgrown.push_back(std::move(memory));
    grow(memory, bytes, make);
  }
  return *memory;
}

}  // namespace

Workspace::Workspace(std::shared_ptr<Device> device)
    : device_(std::move(device)),
      launcher_(device_->context(), device_->kernels()),
      back_(device_->context()) {}

void Workspace::fetch(std::byte* to, CUdeviceptr from, std::size_t bytes) const {
  if (bytes == 0) return;
  const Context& context = device_->context();
  const Current current(context);
  context.check(context.api().MemcpyDtoHAsync(to, from, bytes, stream().handle()),
                "cuMemcpyDtoHAsync");
}

void Workspace::copy(CUdeviceptr to, CUdeviceptr from, std::size_t bytes) const {
  if (bytes == 0 || to == from) return;
  const Context& context = device_->context();
  const Current current(context);
  context.check(context.api().MemcpyDtoDAsync(to, from, bytes, stream().handle()),
                "cuMemcpyDtoDAsync");
}

void Workspace::bring(CUdeviceptr to, const std::byte* from, std::size_t bytes) const {
  if (bytes == 0) return;
  const Context& context = device_->context();
  const Current current(context);
  context.check(context.api().MemcpyHtoDAsync(to, from, bytes, back_.handle()),
                "cuMemcpyHtoDAsync");
}

CUdeviceptr Workspace::on_device(Purpose purpose, std::size_t bytes) {
  auto& memory = on_device_[static_cast<std::size_t>(purpose)];
  if (memory && memory->bytes() >= bytes) return memory->address();
  memory.reset();
  grow(memory, bytes, [this](std::size_t some) {
    return std::make_unique<DeviceMemory>(device_->context(), some, stream().handle());
  });
  return memory->address();
}

CUdeviceptr Workspace::to_lend(Purpose purpose, std::size_t bytes) {
  const auto make = [this](std::size_t some) {
    return std::make_unique<DeviceMemory>(device_->context(), some);
  };
  auto& memory = lent_[static_cast<std::size_t>(purpose)];
  return enough(memory, outgrown_on_device_, bytes, make).address();
}

void Workspace::leak(Purpose purpose) {
  // GPU memory is freed with the last owner of its context.
  auto& memory = lent_[static_cast<std::size_t>(purpose)];
  static_cast<void>(new std::pair(device_, std::move(memory)));
}

std::byte* Workspace::pinned(Purpose purpose, std::size_t bytes) {
  const auto make = [this](std::size_t some) {
    return std::make_unique<PinnedMemory>(device_->context(), some);
  };
  auto& memory = pinned_[static_cast<std::size_t>(purpose)];
  return enough(memory, outgrown_pinned_, bytes, make).data();
}

}  // namespace horoplug::cuda
