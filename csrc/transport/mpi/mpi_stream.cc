#include "transport/mpi/mpi_stream.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <system_error>
#include <thread>
#include <utility>

namespace horoplug {
namespace {

// Seconds that pending segments have, in each direction, when the stream closes.
constexpr std::chrono::milliseconds kLastMoment{200};

}  // namespace

MpiStream::~MpiStream() { close(); }

void MpiStream::finish_sends() {
  while (!sending_.empty() && mpi_->test(sending_.front().request)) {
    free_.push_back(std::move(sending_.front().segment));
    sending_.pop_front();
  }
}

std::size_t MpiStream::write(const iovec* parts, int count) {
  finish_sends();
  std::size_t taken = 0;
  int part = 0;
  std::size_t at = 0;  // offset in the part
  const auto skip_empty = [&] {
    for (; part < count && at == parts[part].iov_len; ++part) at = 0;
  };
  skip_empty();
  while (part < count && sending_.size() < kWindow) {
    std::unique_ptr<Segment> segment;
    if (free_.empty()) {
      segment = std::make_unique_for_overwrite<Segment>();
    } else {
      segment = std::move(free_.back());
      free_.pop_back();
    }
    std::size_t bytes = 0;
    while (part < count && bytes < kSegmentBytes) {
      const std::size_t chunk = std::min(parts[part].iov_len - at, kSegmentBytes - bytes);
      std::memcpy(segment->data + bytes, static_cast<const std::byte*>(parts[part].iov_base) + at,
                  chunk);
      bytes += chunk;
      at += chunk;
      skip_empty();
    }
    segment->bytes = static_cast<std::uint32_t>(bytes);
    const Mpi::Request request = mpi_->send(segment.get(), kHeader + bytes, peer_);
    sending_.push_back({std::move(segment), request});
    taken += bytes;
  }
  return taken;
}

void MpiStream::post(std::unique_ptr<Segment> segment) {
  const Mpi::Request request = mpi_->receive(segment.get(), sizeof(Segment), peer_);
  receiving_.push_back({std::move(segment), request});
}

std::ptrdiff_t MpiStream::read(void* data, std::size_t bytes) {
  finish_sends();
  while (receiving_.size() < (heard_ ? kWindow : 1)) {
    post(std::make_unique_for_overwrite<Segment>());
  }
  std::size_t got = 0;
  while (got < bytes) {
    Transfer& first = receiving_.front();
    if (!have_) {
      if (!mpi_->test(first.request)) break;
      if (first.segment->bytes == 0 || first.segment->bytes > kSegmentBytes) {
        throw std::system_error(std::make_error_code(std::errc::bad_message));
      }
      heard_ = have_ = true;
      taken_ = 0;
    }
    const std::size_t part = std::min(bytes - got, first.segment->bytes - taken_);
    std::memcpy(static_cast<std::byte*>(data) + got, first.segment->data + taken_, part);
    got += part;
    taken_ += part;
    if (taken_ == first.segment->bytes) {
      have_ = false;
      std::unique_ptr<Segment> segment = std::move(first.segment);
      receiving_.pop_front();
      post(std::move(segment));
    }
  }
  return static_cast<std::ptrdiff_t>(got);
}

// Memory that MPI does not release in time, because the peer is gone or does not respond, is leaked
// on purpose: MPI may still write to it.
void MpiStream::close() {
  if (std::exchange(closed_, true)) return;
  const auto ended = [this](std::deque<Transfer>& transfers) {
    const auto until = std::chrono::steady_clock::now() + kLastMoment;
    while (true) {
      bool all = true;
      for (Transfer& transfer : transfers) all &= mpi_->test(transfer.request);
      if (all || std::chrono::steady_clock::now() > until) return all;
      std::this_thread::yield();
    }
  };
  bool over = false;
  try {
    if (!mpi_->finalized()) {
      over = ended(sending_);
      for (Transfer& transfer : receiving_) mpi_->cancel(transfer.request);
      over &= ended(receiving_);
    }
  } catch (const std::system_error&) {
    over = false;
  }
  if (!over) {
    for (auto* transfers : {&sending_, &receiving_}) {
      for (Transfer& transfer : *transfers) {
        if (transfer.request.open) static_cast<void>(transfer.segment.release());
      }
    }
  }
  sending_.clear();
  receiving_.clear();
}

}  // namespace horoplug
