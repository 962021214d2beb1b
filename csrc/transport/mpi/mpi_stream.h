// A byte stream to another rank over MPI messages.
//
// Every message is a packet of bounded size that begins with its length, so that a receive can be
// posted before the size is known. A few receives are posted ahead once the peer is known to send;
// they match in posting order, as the sends do. Written data is copied, because MPI needs the
// memory to stay unchanged.
//
// MPI has no notification and makes no progress unless it is called: a stream with a posted receive
// or a pending send must be polled.
#pragma once

#include <deque>
#include <memory>

#include "transport/mpi/mpi.h"
#include "transport/stream.h"

namespace horoplug {

class MpiStream final : public Stream {
 public:
  static constexpr std::size_t kWindow = 4;  // packets in flight in each direction
  // Two packets hold the largest chunk with its header.
  static constexpr std::size_t kPacketBytes = 128 * 1024 + 64;

  MpiStream(std::shared_ptr<Mpi> mpi, int peer) : mpi_(std::move(mpi)), peer_(peer) {}
  ~MpiStream() override;
  MpiStream(const MpiStream&) = delete;
  MpiStream& operator=(const MpiStream&) = delete;

  std::size_t write(const iovec* parts, int count) override;
  std::ptrdiff_t read(void* data, std::size_t bytes) override;
  // The end of a rank is detected on its other connections, which close.
  void close_write() override {}
  Traits traits() const override { return {WakeUp::kPolling, -1, Carries::kDataOnly, "MPI"}; }
  bool pending() const override { return !sending_.empty(); }
  void close() override;

 private:
  struct Packet {
    std::uint32_t bytes;
    std::byte data[kPacketBytes];
  };
  static constexpr std::size_t kHeader = sizeof(std::uint32_t);
  struct Transfer {
    std::unique_ptr<Packet> packet;
    Mpi::Request request;
  };

  void finish_sends();
  void post(std::unique_ptr<Packet> packet);

  const std::shared_ptr<Mpi> mpi_;
  const int peer_;
  bool closed_ = false;
  std::deque<Transfer> sending_;
  std::deque<std::unique_ptr<Packet>> free_;
  std::deque<Transfer> receiving_;
  bool heard_ = false;     // a packet has arrived at any time
  bool have_ = false;      // the first packet has arrived
  std::size_t taken_ = 0;  // number of its bytes that were read
};

}  // namespace horoplug
