#include "engine/abi/stream_maker.h"

#include "engine/abi/abi.h"
#include "transport/tcp/socket_stream.h"

namespace horoplug::abi {

void StreamMaker::open(const hp_libcrypto* given) {
  if (given != nullptr) libcrypto_ = make_libcrypto(complete(given));
}

StreamMaker::Streams StreamMaker::make(int rank, bool on_other_host, std::vector<Fd> connections,
                                       const std::uint8_t* keys) const {
  if (libcrypto_ && on_other_host && keys == nullptr) {
    throw Error(HP_INVALID_ARGUMENT, "no keys for rank " + std::to_string(rank));
  }
  Streams streams;
  for (Fd& fd : connections) streams.push_back(std::make_unique<SocketStream>(std::move(fd)));
  if (keys == nullptr) return streams;
  if (!libcrypto_) throw Error(HP_INVALID_ARGUMENT, "keys without libcrypto");
  for (auto& stream : streams) {
    stream = encrypted(std::move(stream), keys);
    keys += std::size_t{2} * HP_KEY_BYTES;
  }
  return streams;
}

std::unique_ptr<Stream> StreamMaker::encrypted(std::unique_ptr<Stream> stream,
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

}  // namespace horoplug::abi
