// A stream of bytes to another rank as messages of MPI.
//
// Every message is a segment of bounded size that begins with its length, so that a receive can be
// posted before anybody knows what comes. A few of them are posted ahead once the peer is known to
// send at all; they match in the order of posting, as do those that are on their way out. What is
// written is copied, since MPI needs it to stay where it is.
//
// MPI wakes nobody, and moves nothing while nobody calls it: a stream that waits for something, or
// has something pending, is to be looked at again and again.
#pragma once

#include <deque>
#include <memory>

#include "transport/mpi/mpi.h"
#include "transport/stream.h"

namespace horoplug {

class MpiStream final : public Stream {
 public:
  static constexpr std::size_t kWindow = 4;  // segments on their way in each direction
  // Two of them hold the largest piece in which data travels, with its header.
  static constexpr std::size_t kSegmentBytes = 128 * 1024 + 64;

  MpiStream(std::shared_ptr<Mpi> mpi, int peer) : mpi_(std::move(mpi)), peer_(peer) {}
  ~MpiStream() override;
  MpiStream(const MpiStream&) = delete;
  MpiStream& operator=(const MpiStream&) = delete;

  std::size_t write(const iovec* parts, int count) override;
  std::ptrdiff_t read(void* data, std::size_t bytes) override;
  // The end of a rank shows elsewhere: its other connections close.
  void close_write() override {}
  int fd() const override { return kPolled; }
  bool pending() const override { return !sending_.empty(); }
  void close() override;

 private:
  struct Segment {
    std::uint32_t bytes;
    std::byte data[kSegmentBytes];
  };
  static constexpr std::size_t kHeader = sizeof(std::uint32_t);
  struct Transfer {
    std::unique_ptr<Segment> segment;
    Mpi::Request request;
  };

  void finish_sends();
  void post(std::unique_ptr<Segment> segment);

  const std::shared_ptr<Mpi> mpi_;
  const int peer_;
  bool closed_ = false;
  std::deque<Transfer> sending_;
  std::deque<std::unique_ptr<Segment>> free_;
  std::deque<Transfer> receiving_;
  bool heard_ = false;     // something has ever come
  bool have_ = false;      // the first one has come,
  std::size_t taken_ = 0;  // and so many of its bytes were read
};

}  // namespace horoplug
