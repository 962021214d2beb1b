// Makes the streams of a rank's connections from their descriptors, encrypted if the job asks for
// that.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "horoplug/horoplug.h"
#include "transport/encrypted/encrypted_stream.h"
#include "transport/fd.h"
#include "transport/stream.h"

namespace horoplug::abi {

class StreamMaker {
 public:
  using Streams = std::vector<std::unique_ptr<Stream>>;

  // Called once, before make(). `given`: NULL if nothing is encrypted. Throws Error if it is
  // incomplete.
  void open(const hp_libcrypto* given);

  // The connections to a rank, by lane. `keys`: see hp_peer; NULL: they are not encrypted, which is
  // refused for a rank on another host if anything is. Any thread may call it. Throws Error.
  Streams make(int rank, bool on_other_host, std::vector<Fd> connections,
               const std::uint8_t* keys) const;

 private:
  std::unique_ptr<Stream> encrypted(std::unique_ptr<Stream> stream, const std::uint8_t* keys) const;

  std::optional<Libcrypto> libcrypto_;
  std::shared_ptr<RecordBuffers> buffers_ = std::make_shared<RecordBuffers>();
};

}  // namespace horoplug::abi
