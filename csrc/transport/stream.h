// A connected, ordered, reliable byte stream to one other rank that never blocks.
#pragma once

#include <sys/uio.h>

#include <cstddef>

namespace horoplug {

class Stream {
 public:
  // The peer has closed its side: nothing more will be read.
  static constexpr std::ptrdiff_t kEnd = -1;

  virtual ~Stream() = default;

  // Takes as much of the parts as fits and returns how many bytes that were (0: none now).
  // Throws std::system_error when the stream is broken.
  virtual std::size_t write(const iovec* parts, int count) = 0;

  // Reads up to `bytes` and returns how many came (0: none now), or kEnd. Throws std::system_error.
  virtual std::ptrdiff_t read(void* data, std::size_t bytes) = 0;

  // Says that no more will be written; the peer reads kEnd after what was.
  virtual void close_write() = 0;

  // A descriptor that epoll can watch for this stream, or one of these.
  static constexpr int kRings = -1;   // the peer rings the doorbell instead
  static constexpr int kPolled = -2;  // nobody tells: it is to be looked at again and again
  virtual int fd() const = 0;

  // Whether bytes that were written need further calls to get away. Only where it is polled.
  virtual bool pending() const { return false; }
  // Nothing is read or written any more; for what must not wait for the destructor.
  virtual void close() {}
};

}  // namespace horoplug
