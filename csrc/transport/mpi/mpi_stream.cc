#include "transport/mpi/mpi_stream.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <system_error>
#include <thread>
#include <utility>

namespace horoplug {
namespace {

// Seconds that pending packets have, in each direction, when the stream closes.
constexpr std::chrono::milliseconds kLastMoment{200};

}  // namespace

MpiStream::~MpiStream() { close(); }

void MpiStream::finish_sends() {
  while (!sending_.empty() && mpi_->test(sending_.front().request)) {
    free_.push_back(std::move(sending_.front().packet));
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
    std::unique_ptr<Packet> packet;
    if (free_.empty()) {
      packet = std::make_unique_for_overwrite<Packet>();
    } else {
      packet = std::move(free_.back());
      free_.pop_back();
    }
    std::size_t bytes = 0;
    while (part < count && bytes < kPacketBytes) {
      const std::size_t chunk = std::min(parts[part].iov_len - at, kPacketBytes - bytes);
      std::memcpy(packet->data + bytes, static_cast<const std::byte*>(parts[part].iov_base) + at,
                  chunk);
      bytes += chunk;
      at += chunk;
      skip_empty();
    }
    packet->bytes = static_cast<std::uint32_t>(bytes);
    const Mpi::Request request = mpi_->send(packet.get(), kHeader + bytes, peer_);
    sending_.push_back({std::move(packet), request});
    taken += bytes;
  }
  return taken;
}

void MpiStream::post(std::unique_ptr<Packet> packet) {
  const Mpi::Request request = mpi_->receive(packet.get(), sizeof(Packet), peer_);
  receiving_.push_back({std::move(packet), request});
}

std::ptrdiff_t MpiStream::read(void* data, std::size_t bytes) {
  finish_sends();
  while (receiving_.size() < (heard_ ? kWindow : 1)) {
    post(std::make_unique_for_overwrite<Packet>());
  }
  std::size_t got = 0;
  while (got < bytes) {
    Transfer& first = receiving_.front();
    if (!have_) {
      if (!mpi_->test(first.request)) break;
      if (first.packet->bytes == 0 || first.packet->bytes > kPacketBytes) {
        throw std::system_error(std::make_error_code(std::errc::bad_message));
      }
      heard_ = have_ = true;
      taken_ = 0;
    }
    const std::size_t part = std::min(bytes - got, first.packet->bytes - taken_);
    std::memcpy(static_cast<std::byte*>(data) + got, first.packet->data + taken_, part);
    got += part;
    taken_ += part;
    if (taken_ == first.packet->bytes) {
      have_ = false;
      std::unique_ptr<Packet> packet = std::move(first.packet);
      receiving_.pop_front();
      post(std::move(packet));
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
        if (transfer.request.open) static_cast<void>(transfer.packet.release());
      }
    }
  }
  sending_.clear();
  receiving_.clear();
}

}  // namespace horoplug
