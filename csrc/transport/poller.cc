#include "transport/poller.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>

namespace horoplug {
namespace {

constexpr int kDoorbell = -1;

Fd checked(int fd) {
  if (fd < 0) throw std::system_error(errno, std::generic_category(), "epoll");
  return Fd(fd);
}

void control(const Fd& epoll, int operation, int fd, int token, unsigned events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = static_cast<std::uint32_t>(token);
  if (::epoll_ctl(epoll.get(), operation, fd, &event) != 0) {
    throw std::system_error(errno, std::generic_category(), "epoll");
  }
}

// Rounded up: waking just before a deadline would only lead to another sleep.
int milliseconds(Seconds time) {
  constexpr Seconds kMost = std::chrono::days(1);
  const auto rounded = std::chrono::ceil<std::chrono::milliseconds>(std::min(time, kMost));
  return time == kForever ? -1 : static_cast<int>(rounded.count());
}

// epoll_wait() with a timeout finer than milliseconds, where the system offers it.
template <std::size_t Size>
int wait_for_events(const Fd& epoll, std::array<epoll_event, Size>& events, Seconds time) {
  if (time > Seconds::zero() && time < Seconds(0.01)) {
    pollfd readable{epoll.get(), POLLIN, 0};
    const timespec timeout{0, static_cast<long>(time.count() * 1e9)};
    if (::ppoll(&readable, 1, &timeout, nullptr) == 0) return 0;
    time = Seconds::zero();
  }
  return ::epoll_wait(epoll.get(), events.data(), Size, milliseconds(time));
}

}  // namespace

Poller::Poller(Doorbell& doorbell)
    : doorbell_(doorbell),
      epoll_(checked(::epoll_create1(EPOLL_CLOEXEC))),
      outer_(checked(::epoll_create1(EPOLL_CLOEXEC))),
      kick_(checked(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC))) {
  control(epoll_, EPOLL_CTL_ADD, doorbell.fd(), kDoorbell, EPOLLIN);
  control(outer_, EPOLL_CTL_ADD, epoll_.get(), 0, EPOLLIN);
  control(outer_, EPOLL_CTL_ADD, kick_.get(), 0, EPOLLIN);
}

void Poller::add(int fd, int token) { control(epoll_, EPOLL_CTL_ADD, fd, token, EPOLLIN); }

void Poller::want_write(int fd, int token, bool wanted) {
  const auto index = static_cast<std::size_t>(token);
  if (index >= writing_.size()) writing_.resize(index + 1, 0);
  if ((writing_[index] != 0) == wanted) return;
  writing_[index] = wanted ? 1 : 0;
  control(epoll_, EPOLL_CTL_MOD, fd, token, wanted ? EPOLLIN | EPOLLOUT : EPOLLIN);
}

void Poller::remove(int fd) { ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr); }

void Poller::wait(Seconds time, std::vector<int>& tokens) {
  tokens.clear();
  std::array<epoll_event, 64> events;
  const int count = wait_for_events(epoll_, events, time);
  for (int i = 0; i < count; ++i) {
    const auto token = static_cast<int>(static_cast<std::uint32_t>(events[i].data.u64));
    if (token == kDoorbell) {
      doorbell_.silence();
    } else {
      tokens.push_back(token);
    }
  }
}

void Poller::doze(Seconds time) {
  std::array<epoll_event, 2> events;
  wait_for_events(outer_, events, time);
  std::uint64_t count;
  [[maybe_unused]] const auto read = ::read(kick_.get(), &count, sizeof count);
}

void Poller::mute() {
  control(outer_, EPOLL_CTL_MOD, epoll_.get(), 0, 0);
  muted_.store(true);
}

void Poller::unmute() {
  if (muted_.load() && muted_.exchange(false)) {
    control(outer_, EPOLL_CTL_MOD, epoll_.get(), 0, EPOLLIN);
  }
}

void Poller::kick() {
  const std::uint64_t one = 1;
  // write() fails only if the counter is full, and then the sleeper wakes already.
  [[maybe_unused]] const auto written = ::write(kick_.get(), &one, sizeof one);
}

}  // namespace horoplug
