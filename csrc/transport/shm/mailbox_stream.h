// The stream of a link between two ranks of one host: bytes pass through the ranks' mailboxes, and
// the connection that was there before tells of the end.
//
// Writing changes over when the link has nothing left to write and the peer reads its mailbox
// (begin_writing): the peer may need what was queued before to map its own memory. What was sent
// over the connection is read first; `begins` in the ring says how much that is. Afterwards the
// connection is read only when epoll reports it (note_event), which then means that the peer has
// closed it. What the peer has written to the ring before that is read first.
#pragma once

#include <cstdint>
#include <memory>

#include "transport/doorbell.h"
#include "transport/shm/mailbox.h"
#include "transport/stream.h"

namespace horoplug {

// One end of a ring.
struct RingEnd {
  Mailbox mailbox;     // of the rank that reads the ring
  std::size_t writer;  // the position of the other rank among the ranks of the host
  Mailbox::Ring& ring() const { return mailbox.ring(writer); }
};

class MailboxStream final : public Stream {
 public:
  // `received`: the bytes that have come over the connection so far. `peer`: its doorbell.
  MailboxStream(std::unique_ptr<Stream> connection, RingEnd out, RingEnd in,
                std::shared_ptr<Doorbell> peer, std::uint64_t received);

  // Whether the peer reads its mailbox. Before, it would take the end of the connection for a
  // failure although the ring holds what was written last.
  bool peer_reads() const { return out_.ring().open.load(std::memory_order_acquire) != 0; }
  // Whether begin_writing() was called.
  bool writes() const { return writes_; }
  // From now on, what is written passes through the ring. `sent`: the bytes that have passed over
  // the connection.
  void begin_writing(std::uint64_t sent);

  std::size_t write(const iovec* parts, int count) override;
  std::ptrdiff_t read(void* data, std::size_t bytes) override;
  bool has_more() const override { return !began_ && connection_->has_more(); }
  void close_write() override { connection_->close_write(); }
  void note_event() override { readable_ = true; }
  Traits traits() const override { return {WakeUp::kMailbox, connection_->traits().fd}; }

  // Whether bytes in the ring wait to be read.
  bool unread() const;
  // Wakes a peer that rests if it has not read what was written. The writer calls this before it
  // waits for long, or stops to run the loop.
  void ring_if_unread();

 private:
  std::size_t space();
  void announce();
  std::ptrdiff_t read_ring(std::byte* data, std::size_t bytes);
  std::ptrdiff_t read_connection(void* data, std::size_t bytes);
  bool has_begun();

  const std::unique_ptr<Stream> connection_;
  const RingEnd out_, in_;
  const std::shared_ptr<Doorbell> peer_;

  std::uint64_t written_ = 0;  // to the ring
  std::uint64_t emptied_ = 0;  // of them, those that the peer was known to have read
  std::uint64_t read_ = 0;     // from the ring
  std::uint64_t received_;     // over the connection
  bool writes_ = false;        // to the ring
  bool began_ = false;         // all that came over the connection is read
  bool readable_ = true;       // the connection has to be read
};

}  // namespace horoplug
