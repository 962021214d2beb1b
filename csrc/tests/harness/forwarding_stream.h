// A stream that passes everything on to another one. Tests override what they observe or change.
#pragma once

#include <memory>
#include <utility>

#include "transport/stream.h"

namespace horoplug::testing {

class ForwardingStream : public Stream {
 public:
  explicit ForwardingStream(std::unique_ptr<Stream> stream) : stream_(std::move(stream)) {}
  std::size_t write(const iovec* parts, int count) override { return stream_->write(parts, count); }
  std::ptrdiff_t read(void* data, std::size_t bytes) override { return stream_->read(data, bytes); }
  bool has_more() const override { return stream_->has_more(); }
  void close_write() override { stream_->close_write(); }
  Traits traits() const override { return stream_->traits(); }
  bool pending() const override { return stream_->pending(); }
  void close() override { stream_->close(); }
  std::unique_ptr<Registration> register_memory(void* memory, std::size_t bytes) override {
    return stream_->register_memory(memory, bytes);
  }

 private:
  std::unique_ptr<Stream> stream_;
};

}  // namespace horoplug::testing
