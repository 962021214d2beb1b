// A stream whose bytes travel over another stream as sealed records (record_cipher.h).
//
// write() counts bytes as written when the record with them has left. Until then, the caller has to
// repeat the call with the same bytes, as Link does: a frame that has begun is finished.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "transport/encrypted/record_cipher.h"
#include "transport/stream.h"

namespace horoplug {

// Memory for records, which the streams of one engine share: only a stream with a record that has
// partly arrived or partly left occupies any. One thread at a time uses it.
class RecordBuffers {
 public:
  using Buffer = std::unique_ptr<std::byte[]>;

  Buffer take();
  void give_back(Buffer buffer);

 private:
  std::vector<Buffer> spare_;
};

class EncryptedStream final : public Stream {
 public:
  EncryptedStream(std::unique_ptr<Stream> stream, std::unique_ptr<RecordCipher> sealing,
                  std::unique_ptr<RecordCipher> opening, std::shared_ptr<RecordBuffers> buffers);

  std::size_t write(const iovec* parts, int count) override;
  // Throws TamperedError. The memory at `data` then has undefined contents.
  std::ptrdiff_t read(void* data, std::size_t bytes) override;
  bool has_more() const override;
  void close_write() override { stream_->close_write(); }
  Traits traits() const override { return stream_->traits(); }
  bool pending() const override { return stream_->pending(); }
  void close() override { stream_->close(); }

 private:
  std::size_t take_opened(std::byte* to, std::size_t bytes);
  std::ptrdiff_t receive();
  bool has_whole_record() const;
  std::size_t open_record(std::byte* to, std::size_t room);

  const std::unique_ptr<Stream> stream_;
  const std::unique_ptr<RecordCipher> sealing_, opening_;
  const std::shared_ptr<RecordBuffers> buffers_;

  // The record that leaves; no buffer: none.
  RecordBuffers::Buffer outbox_;
  RecordCipher::Sealed leaving_;
  std::size_t left_ = 0;  // bytes of it that have left

  // What has arrived; no buffer: nothing. Opened bytes that were not read yet lie before begin_.
  RecordBuffers::Buffer inbox_;
  std::size_t begin_ = 0, end_ = 0;  // of the records that were not opened yet
  std::size_t opened_at_ = 0, opened_ = 0;
};

}  // namespace horoplug
