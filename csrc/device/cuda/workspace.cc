#include "device/cuda/workspace.h"

#include <algorithm>
#include <bit>

#include "base/status.h"

namespace horoplug::cuda {
namespace {

// Growing by powers of two costs few allocations, each of which may stop the card; where that is
// more than is left, it grows by no more than it must.
template <typename Memory>
void grow(std::unique_ptr<Memory>& memory, const Context& context, std::size_t bytes) {
  constexpr std::size_t kLeast = 1 << 20;
  if (memory && memory->bytes() >= bytes) return;
  const std::size_t rounded = std::max(kLeast, std::bit_ceil(bytes));
  memory.reset();
  try {
    memory = std::make_unique<Memory>(context, rounded);
  } catch (const Error&) {
    if (rounded == bytes) throw;
    memory = std::make_unique<Memory>(context, bytes);
  }
}

}  // namespace

Workspace::Workspace(std::shared_ptr<Card> card)
    : card_(std::move(card)),
      launcher_(card_->context(), card_->toolkit().images),
      back_(card_->context()) {}

void Workspace::fetch(std::byte* to, CUdeviceptr from, std::size_t bytes) const {
  if (bytes == 0) return;
  const Context& context = card_->context();
  const Current current(context);
  context.check(context.api().MemcpyDtoHAsync(to, from, bytes, stream().handle()),
                "cuMemcpyDtoHAsync");
}

void Workspace::copy(CUdeviceptr to, CUdeviceptr from, std::size_t bytes) const {
  if (bytes == 0 || to == from) return;
  const Context& context = card_->context();
  const Current current(context);
  context.check(context.api().MemcpyDtoDAsync(to, from, bytes, stream().handle()),
                "cuMemcpyDtoDAsync");
}

void Workspace::bring(CUdeviceptr to, const std::byte* from, std::size_t bytes) const {
  if (bytes == 0) return;
  const Context& context = card_->context();
  const Current current(context);
  context.check(context.api().MemcpyHtoDAsync(to, from, bytes, back_.handle()),
                "cuMemcpyHtoDAsync");
}

CUdeviceptr Workspace::on_card(Purpose purpose, std::size_t bytes) {
  auto& memory = on_card_[static_cast<std::size_t>(purpose)];
  grow(memory, card_->context(), bytes);
  return memory->address();
}

std::byte* Workspace::on_host(Purpose purpose, std::size_t bytes) {
  auto& memory = on_host_[static_cast<std::size_t>(purpose)];
  grow(memory, card_->context(), bytes);
  return memory->data();
}

}  // namespace horoplug::cuda
