#include "transport/doorbell.h"

#include <sched.h>
#include <sys/eventfd.h>

#include <cerrno>
#include <system_error>

namespace horoplug {

void full_fence() {
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wtsan"  // the fence orders atomic accesses only
#endif
  std::atomic_thread_fence(std::memory_order_seq_cst);
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
}

Doorbell::Doorbell() : event_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (!event_) throw std::system_error(errno, std::generic_category(), "eventfd");
}

void Doorbell::ring_if(std::uint32_t deepest) {
  const std::uint32_t found = word_->load() & kState;
  if (found == kAwake || found > deepest) return;
  const auto processor = static_cast<std::uint32_t>(::sched_getcpu() + 1);
  if ((word_->exchange(kAwake | processor << kStateBits) & kState) == kAwake) return;
  const std::uint64_t one = 1;
  // write() fails only if the counter is full, and then the owner is being woken already.
  [[maybe_unused]] const auto written = ::write(event_.get(), &one, sizeof one);
}

void Doorbell::silence() {
  std::uint64_t count;
  [[maybe_unused]] const auto read = ::read(event_.get(), &count, sizeof count);
}

}  // namespace horoplug
