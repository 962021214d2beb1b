// Makes all streams of a rank: of the connections that it is given, encrypted if the job asks for
// that, and, by functions that it is given, of transports that need no connection. No other code
// decides which streams a rank has.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "transport/encrypted/encrypted_stream.h"
#include "transport/fd.h"
#include "transport/stream.h"

namespace horoplug {

class StreamFactory {
 public:
  using Streams = std::vector<std::unique_ptr<Stream>>;
  struct Peer {
    int rank;
    bool on_other_host;
    const std::uint8_t* keys;  // as in hp_peer; nullptr: the connections are not encrypted
  };

  // Makes a stream to a rank on another host that needs no connection and carries data only.
  using DataStream = std::function<std::unique_ptr<Stream>(int rank)>;

  // Before the first stream is made: connections to other hosts have to be encrypted.
  void encrypt_with(const Libcrypto& libcrypto) { libcrypto_ = libcrypto; }

  // All streams to a rank at the start. If there is no connection yet, `absent` streams take the
  // place of those that are to be made on demand. `beside`: the streams that carry the data between
  // hosts in place of the connections; they exist from the start. Throws Error, also if keys are
  // missing, or if a stream of `beside` would carry data that has to be encrypted.
  Streams make_all(const Peer& peer, std::vector<Fd> connections, int absent,
                   const std::vector<DataStream>& beside) const;
  // The streams of connections, by lane. Any thread may call it. Throws Error likewise.
  Streams connect(const Peer& peer, std::vector<Fd> connections) const;

 private:
  std::unique_ptr<Stream> encrypted(std::unique_ptr<Stream> stream, const std::uint8_t* keys) const;

  std::optional<Libcrypto> libcrypto_;
  std::shared_ptr<RecordBuffers> buffers_ = std::make_shared<RecordBuffers>();
};

}  // namespace horoplug
