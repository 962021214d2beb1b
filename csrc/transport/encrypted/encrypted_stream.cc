#include "transport/encrypted/encrypted_stream.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace horoplug {
namespace {

// Buffers that are kept for reuse. A stream mostly needs one for the duration of a call.
constexpr std::size_t kMostSpare = 8;

}  // namespace

RecordBuffers::Buffer RecordBuffers::take() {
  if (spare_.empty()) {
    return std::make_unique_for_overwrite<std::byte[]>(RecordCipher::kMostRecord);
  }
  Buffer buffer = std::move(spare_.back());
  spare_.pop_back();
  return buffer;
}

void RecordBuffers::give_back(Buffer buffer) {
  if (spare_.size() < kMostSpare) spare_.push_back(std::move(buffer));
}

EncryptedStream::EncryptedStream(std::unique_ptr<Stream> stream,
                                 std::unique_ptr<RecordCipher> sealing,
                                 std::unique_ptr<RecordCipher> opening,
                                 std::shared_ptr<RecordBuffers> buffers)
    : stream_(std::move(stream)),
      sealing_(std::move(sealing)),
      opening_(std::move(opening)),
      buffers_(std::move(buffers)) {}

std::size_t EncryptedStream::write(const iovec* parts, int count) {
  if (!outbox_) {
    outbox_ = buffers_->take();
    leaving_ = sealing_->seal(parts, count, outbox_.get());
    left_ = 0;
  }
  const iovec rest{outbox_.get() + left_, leaving_.record - left_};
  if (rest.iov_len > 0) left_ += stream_->write(&rest, 1);
  if (left_ < leaving_.record) return 0;
  buffers_->give_back(std::move(outbox_));
  return leaving_.plain;
}

std::ptrdiff_t EncryptedStream::read(void* data, std::size_t bytes) {
  auto* const to = static_cast<std::byte*>(data);
  std::size_t done = take_opened(to, bytes);
  while (done < bytes) {
    if (has_whole_record()) {
      done += open_record(to + done, bytes - done);
    } else if (done > 0) {
      break;
    } else if (const std::ptrdiff_t got = receive(); got <= 0) {
      return got;
    }
  }
  if (inbox_ && begin_ == end_ && opened_ == 0) buffers_->give_back(std::move(inbox_));
  return static_cast<std::ptrdiff_t>(done);
}

bool EncryptedStream::has_more() const { return opened_ > 0 || has_whole_record(); }

// Bytes that are opened already.
std::size_t EncryptedStream::take_opened(std::byte* to, std::size_t bytes) {
  const std::size_t taken = std::min(opened_, bytes);
  if (taken > 0) std::memcpy(to, inbox_.get() + opened_at_, taken);
  opened_at_ += taken;
  opened_ -= taken;
  return taken;
}

// Adds what has arrived to the inbox, which has no whole record. Returns what Stream::read does.
std::ptrdiff_t EncryptedStream::receive() {
  const bool is_new = !inbox_;
  if (is_new) {
    inbox_ = buffers_->take();
    begin_ = end_ = 0;
  } else if (begin_ > 0) {
    std::memmove(inbox_.get(), inbox_.get() + begin_, end_ - begin_);
    end_ -= std::exchange(begin_, 0);
  }
  const std::ptrdiff_t got = stream_->read(inbox_.get() + end_, RecordCipher::kMostRecord - end_);
  if (got > 0) end_ += static_cast<std::size_t>(got);
  if (is_new && end_ == 0) buffers_->give_back(std::move(inbox_));
  return got;
}

// Also if what has arrived is no record, which open_record() reports.
bool EncryptedStream::has_whole_record() const {
  if (!inbox_ || end_ - begin_ < RecordCipher::kHeadBytes) return false;
  return RecordCipher::record_bytes(inbox_.get() + begin_) <= end_ - begin_;
}

// Opens the next record, into `to` if there is room for all of it. Returns the bytes that `to` has
// got; the others stay here.
std::size_t EncryptedStream::open_record(std::byte* to, std::size_t room) {
  std::byte* const record = inbox_.get() + begin_;
  const std::size_t bytes = RecordCipher::record_bytes(record);
  const std::size_t plain = bytes - RecordCipher::kHeadBytes - RecordCipher::kTagBytes;
  const bool fits = plain <= room;
  if (bytes == 0 || !opening_->open(record, fits ? to : record + RecordCipher::kHeadBytes)) {
    throw TamperedError(
        "its data does not authenticate: somebody has changed, repeated, left out or reordered it "
        "on its way");
  }
  opened_at_ = begin_ + RecordCipher::kHeadBytes;
  begin_ += bytes;
  if (fits) return plain;
  opened_ = plain;
  return take_opened(to, room);
}

}  // namespace horoplug
