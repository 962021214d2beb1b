#include "transport/inproc/pipe.h"

#include <algorithm>
#include <mutex>
#include <vector>

namespace horoplug {
namespace {

// Small enough that tests see partial writes.
constexpr std::size_t kCapacity = 256 * 1024;

// One direction: a ring buffer under a lock.
struct Direction {
  std::mutex mutex;
  std::vector<std::byte> ring = std::vector<std::byte>(kCapacity);
  std::size_t head = 0;  // total bytes read
  std::size_t tail = 0;  // total bytes written
  bool closed = false;
  bool writer_waits = false;

  std::size_t put(const std::byte* data, std::size_t bytes) {
    bytes = std::min(bytes, kCapacity - (tail - head));
    const std::size_t at = tail % kCapacity;
    const std::size_t first = std::min(bytes, kCapacity - at);
    std::copy_n(data, first, ring.data() + at);
    std::copy_n(data + first, bytes - first, ring.data());
    tail += bytes;
    return bytes;
  }

  std::size_t get(std::byte* data, std::size_t bytes) {
    bytes = std::min(bytes, tail - head);
    const std::size_t at = head % kCapacity;
    const std::size_t first = std::min(bytes, kCapacity - at);
    std::copy_n(ring.data() + at, first, data);
    std::copy_n(ring.data(), bytes - first, data + first);
    head += bytes;
    return bytes;
  }
};

class InprocStream final : public Stream {
 public:
  InprocStream(std::shared_ptr<Direction> out, std::shared_ptr<Direction> in,
               std::shared_ptr<Doorbell> peer)
      : out_(std::move(out)), in_(std::move(in)), peer_(std::move(peer)) {}
  ~InprocStream() override {
    close_write();
    // A writer on the other side must not wait for space that is never freed: its bytes have no
    // reader.
    {
      std::lock_guard lock(in_->mutex);
      in_->head = in_->tail;
    }
    peer_->ring();
  }

  std::size_t write(const iovec* parts, int count) override {
    std::size_t taken = 0;
    {
      std::lock_guard lock(out_->mutex);
      for (int i = 0; i < count; ++i) {
        const auto* data = static_cast<const std::byte*>(parts[i].iov_base);
        const std::size_t put = out_->put(data, parts[i].iov_len);
        taken += put;
        if (put < parts[i].iov_len) {
          out_->writer_waits = true;
          break;
        }
      }
    }
    if (taken > 0) peer_->ring();
    return taken;
  }

  std::ptrdiff_t read(void* data, std::size_t bytes) override {
    std::size_t got = 0;
    bool wake = false;
    {
      std::lock_guard lock(in_->mutex);
      got = in_->get(static_cast<std::byte*>(data), bytes);
      if (got == 0 && in_->closed) return kEnd;
      if (got > 0) wake = std::exchange(in_->writer_waits, false);
    }
    if (wake) peer_->ring();
    return static_cast<std::ptrdiff_t>(got);
  }

  void close_write() override {
    {
      std::lock_guard lock(out_->mutex);
      out_->closed = true;
    }
    peer_->ring();
  }

  Traits traits() const override { return {WakeUp::kDoorbell}; }

 private:
  std::shared_ptr<Direction> out_;
  std::shared_ptr<Direction> in_;
  std::shared_ptr<Doorbell> peer_;
};

}  // namespace

std::pair<std::unique_ptr<Stream>, std::unique_ptr<Stream>> make_inproc_pipe(
    std::shared_ptr<Doorbell> first, std::shared_ptr<Doorbell> second) {
  auto there = std::make_shared<Direction>();
  auto back = std::make_shared<Direction>();
  auto a = std::make_unique<InprocStream>(there, back, std::move(second));
  auto b = std::make_unique<InprocStream>(back, there, std::move(first));
  return {std::move(a), std::move(b)};
}

}  // namespace horoplug
