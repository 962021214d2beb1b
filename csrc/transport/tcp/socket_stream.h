// A stream over a connected socket: TCP between hosts, a Unix socket within a host.
#pragma once

#include "transport/fd.h"
#include "transport/stream.h"

namespace horoplug {

class SocketStream final : public Stream {
 public:
  // Takes ownership of the descriptor and makes it non-blocking.
  explicit SocketStream(Fd fd);

  std::size_t write(const iovec* parts, int count) override;
  std::ptrdiff_t read(void* data, std::size_t bytes) override;
  void close_write() override;
  Traits traits() const override { return {WakeUp::kDescriptor, fd_.get()}; }

 private:
  Fd fd_;
};

}  // namespace horoplug
