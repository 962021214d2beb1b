// A connected, ordered, reliable byte stream to one other rank. Its functions never block.
#pragma once

#include <sys/uio.h>

#include <cstddef>

#include "base/wire.h"

namespace horoplug {

// What has arrived on an encrypted stream is not what the peer has sent. The text names the peer
// as "it".
class TamperedError : public WireError {
 public:
  using WireError::WireError;
};

class Stream {
 public:
  // The peer has closed its side: no more data will arrive.
  static constexpr std::ptrdiff_t kEnd = -1;

  virtual ~Stream() = default;

  // Writes as many bytes of `parts` as fit and returns their number, which may be 0. Throws
  // std::system_error if the stream is broken.
  virtual std::size_t write(const iovec* parts, int count) = 0;

  // Reads up to `bytes` and returns their number, which may be 0, or kEnd. Throws
  // std::system_error.
  virtual std::ptrdiff_t read(void* data, std::size_t bytes) = 0;

  // Whether read() would return bytes that fd() does not announce, because they have left the
  // descriptor already.
  virtual bool has_more() const { return false; }

  // Ends the sending direction; the peer reads kEnd after the data.
  virtual void close_write() = 0;

  // A descriptor that epoll can watch for this stream, or one of the constants below.
  static constexpr int kRings = -1;   // the peer rings the doorbell instead
  static constexpr int kPolled = -2;  // there is no notification: the stream must be polled
  static constexpr int kAbsent = -3;  // not connected yet: see AbsentStream
  virtual int fd() const = 0;

  // Whether written bytes need further calls to be sent. Only polled streams return true.
  virtual bool pending() const { return false; }
  // Releases what must not wait for the destructor. Nothing is read or written afterwards.
  virtual void close() {}
};

}  // namespace horoplug
