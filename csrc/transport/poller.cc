#include "transport/poller.h"

#include <sys/epoll.h>

#include <array>
#include <cerrno>
#include <cmath>
#include <system_error>

namespace horoplug {
namespace {

constexpr int kDoorbell = -1;

}  // namespace

Poller::Poller(const Doorbell& doorbell) : epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
  if (!epoll_) throw std::system_error(errno, std::generic_category(), "epoll");
  control(EPOLL_CTL_ADD, doorbell.fd(), kDoorbell, EPOLLIN);
}

void Poller::control(int operation, int fd, int token, unsigned events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = static_cast<std::uint32_t>(token);
  if (::epoll_ctl(epoll_.get(), operation, fd, &event) != 0) {
    throw std::system_error(errno, std::generic_category(), "epoll");
  }
}

void Poller::add(int fd, int token) { control(EPOLL_CTL_ADD, fd, token, EPOLLIN); }

void Poller::want_write(int fd, int token, bool wanted) {
  const auto index = static_cast<std::size_t>(token);
  if (index >= writing_.size()) writing_.resize(index + 1, 0);
  if ((writing_[index] != 0) == wanted) return;
  writing_[index] = wanted ? 1 : 0;
  control(EPOLL_CTL_MOD, fd, token, wanted ? EPOLLIN | EPOLLOUT : EPOLLIN);
}

void Poller::remove(int fd) { ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr); }

void Poller::wait(double seconds, std::vector<int>& tokens) {
  tokens.clear();
  // Rounded up: waking just before a deadline would only mean to sleep again.
  const int milliseconds =
      seconds < 0 ? -1 : static_cast<int>(std::ceil(std::fmin(seconds, 86400.0) * 1000));
  std::array<epoll_event, 64> events;
  const int count = ::epoll_wait(epoll_.get(), events.data(), events.size(), milliseconds);
  for (int i = 0; i < count; ++i) {
    const auto token = static_cast<int>(static_cast<std::uint32_t>(events[i].data.u64));
    if (token != kDoorbell) tokens.push_back(token);
  }
}

}  // namespace horoplug
