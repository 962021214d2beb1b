// One side of a connection without an engine: a test reads and writes the messages.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "controller/messages/messages.h"
#include "harness/cluster.h"

namespace horoplug::testing {

// The peer's end of an engine's connection: the test reads and writes the messages.
class RawPeer {
 public:
  explicit RawPeer(std::unique_ptr<Stream> stream) : stream_(std::move(stream)) {}

  void send(FrameHeader header, const Bytes& payload) {
    std::vector<std::byte> frame(sizeof header);
    std::memcpy(frame.data(), &header, sizeof header);
    frame.insert(frame.end(), payload.begin(), payload.end());
    send_bytes(frame);
  }
  void send(const Bytes& message) {
    FrameHeader header;
    header.bytes = message.size();
    send(header, message);
  }
  void send_bytes(const std::vector<std::byte>& bytes) {
    std::size_t done = 0;
    while (done < bytes.size()) {
      iovec part{const_cast<std::byte*>(bytes.data()) + done, bytes.size() - done};
      done += stream_->write(&part, 1);
    }
  }
  void hang_up() { stream_.reset(); }
  // Reads until the engine has closed its side.
  void wait_for_end() {
    std::byte ignored[256];
    while (stream_->read(ignored, sizeof ignored) != Stream::kEnd) std::this_thread::yield();
  }

 private:
  std::unique_ptr<Stream> stream_;
};

inline Hello hello_of(int rank, int size, const EngineOptions& options) {
  Hello hello;
  hello.rank = rank;
  hello.size = size;
  hello.settings = {{"horoplug version", HOROPLUG_VERSION},
                    {"number of ranks", std::to_string(size)}};
  for (auto& setting : compared_settings(options)) hello.settings.push_back(std::move(setting));
  return hello;
}

// A job of two ranks: an engine is rank 0, the test is rank 1.
struct HalfJob {
  explicit HalfJob(const EngineOptions& options = test_options()) {
    auto configs = make_configs(Transport::kTcp, 2, options);
    peer = std::make_unique<RawPeer>(std::move(configs[1].members[0].stream));
    engine = std::make_unique<Engine>(std::move(configs[0]));
  }
  void introduce(const EngineOptions& options = test_options()) {
    peer->send(encode(hello_of(1, 2, options)));
    engine->wait_until_ready();
  }
  std::unique_ptr<RawPeer> peer;
  std::unique_ptr<Engine> engine;
};

// A job of three ranks: an engine is one of them, the test is the other two.
struct ThirdOfJob {
  explicit ThirdOfJob(int rank) {
    auto configs = make_configs(Transport::kTcp, 3, test_options());
    const auto self = static_cast<std::size_t>(rank);
    for (std::size_t peer = 0; peer < peers.size(); ++peer) {
      if (peer == self) continue;
      peers[peer] = std::make_unique<RawPeer>(std::move(configs[peer].members[self].stream));
    }
    engine = std::make_unique<Engine>(std::move(configs[self]));
  }
  void introduce(int peer) { at(peer).send(encode(hello_of(peer, 3, test_options()))); }
  // A peer introduces itself and shuts down.
  void shut_down(int peer) {
    DecisionItem end;
    end.kind = DecisionItem::Kind::kClose;
    introduce(peer);
    at(peer).send(encode(0, Decisions{0, {end}}));
    at(peer).send(encode(MessageKind::kBye));
    // The engine answers a goodbye by closing its side: it has read the goodbye when this returns.
    at(peer).wait_for_end();
    at(peer).hang_up();
  }
  RawPeer& at(int peer) { return *peers[static_cast<std::size_t>(peer)]; }
  std::array<std::unique_ptr<RawPeer>, 3> peers;
  std::unique_ptr<Engine> engine;
};

}  // namespace horoplug::testing
