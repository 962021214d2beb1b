// A connected, ordered, reliable byte stream to one other rank. Its functions never block.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <memory>

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

  // How the owner of this end learns that there is something to read.
  enum class WakeUp {
    kDescriptor,  // epoll reports it
    kMailbox,     // a bit in the owner's mailbox, and a ring; epoll reports the end
    kDoorbell,    // the peer rings the owner's doorbell
    kPolling,     // nothing tells: the stream must be polled
    kAbsent,      // never: the stream is not connected yet, see AbsentStream
  };
  // What two ranks use the stream for. If some of their streams carry data only, collectives use
  // these alone.
  enum class Carries { kEverything, kDataOnly };
  struct Traits {
    WakeUp wake_up;
    int fd = -1;  // of kDescriptor and kMailbox
    Carries carries = Carries::kEverything;
    const char* name = "";  // of kDataOnly, for users: all ranks must use the same ones
  };

  virtual ~Stream() = default;

  // They never change.
  virtual Traits traits() const = 0;

  // Writes as many bytes of `parts` as fit and returns their number, which may be 0. Throws
  // std::system_error if the stream is broken.
  virtual std::size_t write(const iovec* parts, int count) = 0;

  // Reads up to `bytes` and returns their number, which may be 0, or kEnd. Throws
  // std::system_error.
  virtual std::ptrdiff_t read(void* data, std::size_t bytes) = 0;

  // Whether read() would return bytes that the descriptor does not announce, because they have left
  // it already.
  virtual bool has_more() const { return false; }

  // epoll has reported the descriptor.
  virtual void note_event() {}

  // Ends the sending direction; the peer reads kEnd after the data. Streams that carry data only
  // may leave that out: the connections to the peer tell it.
  virtual void close_write() = 0;

  // Whether written bytes need further calls to be sent. Only polled streams return true.
  virtual bool pending() const { return false; }
  // Releases what must not wait for the destructor. Nothing is read or written afterwards. Called
  // of polled streams only.
  virtual void close() {}

  // Prepares memory that is often written or read, as devices need that access it themselves, until
  // the result is destroyed. nullptr: the stream needs no preparation. Nothing calls it yet.
  class Registration {
   public:
    virtual ~Registration() = default;
  };
  virtual std::unique_ptr<Registration> register_memory(void* /*memory*/, std::size_t /*bytes*/) {
    return nullptr;
  }
};

}  // namespace horoplug
