#include "transport/shm/mailbox_stream.h"

#include <algorithm>
#include <cstring>
#include <system_error>
#include <utility>

namespace horoplug {
namespace {

constexpr std::size_t kRing = Mailbox::kRingBytes;
static_assert((kRing & (kRing - 1)) == 0);
// So much of a long message is written before the peer may read it, so that both copy at once.
constexpr std::size_t kPiece = kRing / 4;

}  // namespace

MailboxStream::MailboxStream(std::unique_ptr<Stream> connection, RingEnd out, RingEnd in,
                             std::shared_ptr<Doorbell> peer, std::uint64_t received)
    : connection_(std::move(connection)),
      out_(std::move(out)),
      in_(std::move(in)),
      peer_(std::move(peer)),
      received_(received) {
  in_.ring().open.store(1, std::memory_order_release);
}

// ---- writing ----

void MailboxStream::begin_writing(std::uint64_t sent) {
  out_.ring().begins.store(sent + 1, std::memory_order_release);
  writes_ = true;
}

// Bytes that fit into the ring. If there are none, the peer rings when it has read some.
std::size_t MailboxStream::space() {
  Mailbox::Ring& ring = out_.ring();
  const auto left = [&] {
    emptied_ = ring.read.load(std::memory_order_acquire);
    if (written_ - emptied_ > kRing) {
      throw std::system_error(EPROTO, std::generic_category(), "the peer's mailbox");
    }
    return kRing - (written_ - emptied_);
  };
  if (written_ - emptied_ <= kRing - kPiece) return kRing - (written_ - emptied_);
  if (const std::size_t bytes = left(); bytes > 0) return bytes;
  ring.full.store(1, std::memory_order_relaxed);
  full_fence();
  return left();
}

// Makes what was written visible, and wakes the peer if it sleeps in an operation.
void MailboxStream::announce() {
  out_.ring().written.store(written_, std::memory_order_release);
  const std::uint64_t bit = std::uint64_t{1} << out_.writer % 64;
  out_.mailbox.news()[out_.writer / 64].fetch_or(bit);
  full_fence();
  peer_->ring_unless_resting();
}

void MailboxStream::ring_if_unread() {
  if (out_.ring().read.load(std::memory_order_acquire) != written_) peer_->ring();
}

std::size_t MailboxStream::write(const iovec* parts, int count) {
  if (!writes_) return connection_->write(parts, count);
  std::byte* const memory = out_.ring().data;
  std::size_t taken = 0, unannounced = 0;
  for (int i = 0; i < count; ++i) {
    const auto* data = static_cast<const std::byte*>(parts[i].iov_base);
    std::size_t left = parts[i].iov_len;
    while (left > 0) {
      const std::size_t free = space();
      if (free == 0) break;
      const std::size_t at = written_ % kRing;
      const std::size_t bytes = std::min({left, free, kPiece, kRing - at});
      std::memcpy(memory + at, data, bytes);
      written_ += bytes;
      taken += bytes;
      unannounced += bytes;
      data += bytes;
      left -= bytes;
      if (unannounced >= kPiece) {
        announce();
        unannounced = 0;
      }
    }
    if (left > 0) break;
  }
  if (unannounced > 0) announce();
  return taken;
}

// ---- reading ----

bool MailboxStream::unread() const {
  return in_.ring().written.load(std::memory_order_acquire) != read_;
}

std::ptrdiff_t MailboxStream::read_ring(std::byte* data, std::size_t bytes) {
  Mailbox::Ring& ring = in_.ring();
  const std::uint64_t there = ring.written.load(std::memory_order_acquire) - read_;
  if (there == 0) return 0;
  if (there > kRing) throw WireError("its end of a mailbox is not valid");
  const std::size_t at = read_ % kRing;
  const std::size_t got = std::min<std::size_t>(bytes, there);
  const std::size_t first = std::min(got, kRing - at);
  std::memcpy(data, ring.data + at, first);
  std::memcpy(data + first, ring.data, got - first);
  read_ += got;
  ring.read.store(read_, std::memory_order_release);
  full_fence();
  if (ring.full.load(std::memory_order_relaxed) != 0 &&
      ring.full.exchange(0, std::memory_order_relaxed) != 0) {
    peer_->ring();
  }
  return static_cast<std::ptrdiff_t>(got);
}

std::ptrdiff_t MailboxStream::read_connection(void* data, std::size_t bytes) {
  if (!readable_) return 0;
  const std::ptrdiff_t got = connection_->read(data, bytes);
  if (got == 0 && !connection_->has_more()) readable_ = false;
  if (got > 0) received_ += static_cast<std::uint64_t>(got);
  return got;
}

// Whether everything that the peer has sent over the connection is read.
bool MailboxStream::has_begun() {
  if (began_) return true;
  const std::uint64_t begins = in_.ring().begins.load(std::memory_order_acquire);
  began_ = begins != 0 && received_ + 1 >= begins;
  return began_;
}

std::ptrdiff_t MailboxStream::read(void* data, std::size_t bytes) {
  auto* const to = static_cast<std::byte*>(data);
  if (has_begun()) {
    if (const std::ptrdiff_t got = read_ring(to, bytes); got > 0) return got;
  }
  const std::ptrdiff_t got = read_connection(data, bytes);
  if (got != kEnd) {
    if (got > 0 && began_) throw WireError("data beside its mailbox");
    return got;
  }
  // The peer may have written to the ring after the look above, and closed the connection then.
  const std::ptrdiff_t last = has_begun() ? read_ring(to, bytes) : 0;
  return last > 0 ? last : kEnd;
}

}  // namespace horoplug
