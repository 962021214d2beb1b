#include "transport/stream_factory.h"

#include <string>
#include <utility>

#include "base/status.h"
#include "transport/absent_stream.h"
#include "transport/tcp/socket_stream.h"

namespace horoplug {

StreamFactory::Streams StreamFactory::make_all(const Peer& peer, std::vector<Fd> connections,
                                               int absent,
                                               const std::vector<DataStream>& beside) const {
  Streams streams;
  if (connections.empty()) {
    while (absent-- > 0) streams.push_back(std::make_unique<AbsentStream>());
  } else {
    streams = connect(peer, std::move(connections));
  }
  if (!peer.on_other_host || streams.empty()) return streams;
  // After the connections, of which the first one carries the control messages.
  for (const DataStream& make : beside) {
    streams.push_back(make(peer.rank));
    if (!libcrypto_) continue;
    throw Error(HP_INVALID_ARGUMENT, std::string(streams.back()->traits().name) +
                                         " does not encrypt what it carries between hosts");
  }
  return streams;
}

StreamFactory::Streams StreamFactory::connect(const Peer& peer, std::vector<Fd> connections) const {
  if (libcrypto_ && peer.on_other_host && peer.keys == nullptr) {
    throw Error(HP_INVALID_ARGUMENT, "no keys for rank " + std::to_string(peer.rank));
  }
  if (peer.keys != nullptr && !libcrypto_) {
    throw Error(HP_INVALID_ARGUMENT, "keys without libcrypto");
  }
  Streams streams;
  for (Fd& fd : connections) {
    std::unique_ptr<Stream> stream = std::make_unique<SocketStream>(std::move(fd));
    if (peer.keys != nullptr) {
      stream =
          encrypted(std::move(stream), peer.keys + 2 * streams.size() * std::size_t{HP_KEY_BYTES});
    }
    streams.push_back(std::move(stream));
  }
  return streams;
}

std::unique_ptr<Stream> StreamFactory::encrypted(std::unique_ptr<Stream> stream,
                                                 const std::uint8_t* keys) const {
  using Cipher = RecordCipher;
  const auto cipher = [&](Cipher::Direction direction, const std::uint8_t* key) {
    return std::make_unique<Cipher>(*libcrypto_, direction, Cipher::Key(key, HP_KEY_BYTES));
  };
  auto sealing = cipher(Cipher::Direction::kSeal, keys);
  auto opening = cipher(Cipher::Direction::kOpen, keys + HP_KEY_BYTES);
  return std::make_unique<EncryptedStream>(std::move(stream), std::move(sealing),
                                           std::move(opening), buffers_);
}

}  // namespace horoplug
