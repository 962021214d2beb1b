#include "transport/tcp/socket_stream.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <cerrno>
#include <system_error>

namespace horoplug {

SocketStream::SocketStream(Fd fd) : fd_(std::move(fd)) {
  const int flags = ::fcntl(fd_.get(), F_GETFL);
  if (flags < 0 || ::fcntl(fd_.get(), F_SETFL, flags | O_NONBLOCK) < 0) {
    throw std::system_error(errno, std::generic_category(), "not a usable socket");
  }
}

std::size_t SocketStream::write(const iovec* parts, int count) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts);
  message.msg_iovlen = static_cast<std::size_t>(count);
  while (true) {
    const ssize_t sent = ::sendmsg(fd_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) return static_cast<std::size_t>(sent);
    if (errno == EAGAIN || errno == EWOULDBLOCK) return 0;
    if (errno != EINTR) throw std::system_error(errno, std::generic_category(), "send");
  }
}

std::ptrdiff_t SocketStream::read(void* data, std::size_t bytes) {
  while (true) {
    const ssize_t got = ::recv(fd_.get(), data, bytes, MSG_DONTWAIT);
    if (got > 0) return got;
    if (got == 0) return kEnd;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return 0;
    if (errno != EINTR) throw std::system_error(errno, std::generic_category(), "receive");
  }
}

void SocketStream::close_write() { ::shutdown(fd_.get(), SHUT_WR); }

}  // namespace horoplug
