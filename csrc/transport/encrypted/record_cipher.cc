#include "transport/encrypted/record_cipher.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string_view>

#include "base/status.h"
#include "base/wipe.h"

namespace horoplug {
namespace {

// Commands of EVP_CIPHER_CTX_ctrl.
constexpr int kGetTag = 0x10;
constexpr int kSetTag = 0x11;

constexpr std::size_t kNonceBytes = 12;
constexpr std::string_view kNextKey = "horoplug next key";

const unsigned char* as_chars(const std::byte* bytes) {
  return reinterpret_cast<const unsigned char*>(bytes);
}
unsigned char* as_chars(std::byte* bytes) { return reinterpret_cast<unsigned char*>(bytes); }

void require(bool done) {
  if (!done) throw Error(HP_INTERNAL, "libcrypto cannot encrypt");
}

void put_length(std::byte* head, std::size_t length) {
  for (std::size_t i = 0; i < RecordCipher::kHeadBytes; ++i) {
    head[i] = static_cast<std::byte>(length >> (8 * i));
  }
}

std::size_t length_of(const std::byte* head) {
  std::size_t length = 0;
  for (std::size_t i = 0; i < RecordCipher::kHeadBytes; ++i) {
    length |= std::to_integer<std::size_t>(head[i]) << (8 * i);
  }
  return length;
}

}  // namespace

RecordCipher::RecordCipher(const Libcrypto& libcrypto, Direction direction, Key key,
                           Numbering numbering)
    : libcrypto_(libcrypto),
      direction_(direction),
      records_per_key_(numbering.records_per_key),
      number_(numbering.first),
      left_(numbering.records_per_key),
      context_(libcrypto.context_new(), Free{libcrypto.context_free}) {
  require(context_ != nullptr);
  std::copy(key.begin(), key.end(), key_.begin());
  const int seals = direction_ == Direction::kSeal ? 1 : 0;
  require(libcrypto_.cipher_init(context_.get(), libcrypto_.aes_256_gcm(), nullptr, nullptr,
                                 nullptr, seals) == 1);
  use_key();
}

RecordCipher::~RecordCipher() { wipe(key_); }

void RecordCipher::use_key() {
  require(libcrypto_.cipher_init(context_.get(), nullptr, nullptr, key_.data(), nullptr, -1) == 1);
}

void RecordCipher::replace_key() {
  std::array<unsigned char, kKeyBytes> next{};
  unsigned bytes = 0;
  require(libcrypto_.hmac(libcrypto_.sha256(), key_.data(), static_cast<int>(key_.size()),
                          reinterpret_cast<const unsigned char*>(kNextKey.data()), kNextKey.size(),
                          next.data(), &bytes) != nullptr &&
          bytes == next.size());
  key_ = next;
  wipe(next);
  use_key();
  left_ = records_per_key_;
}

std::size_t RecordCipher::record_bytes(const std::byte* head) {
  const std::size_t length = length_of(head);
  return length == 0 || length > kMostPlain ? 0 : kHeadBytes + length + kTagBytes;
}

// Sets the record's nonce and its additional data.
void RecordCipher::begin_record(const std::byte* head) {
  if (number_ == std::numeric_limits<std::uint64_t>::max()) {
    throw Error(HP_INTERNAL, "a connection has no numbers left for encrypted records");
  }
  if (left_ == 0) replace_key();
  std::array<unsigned char, kNonceBytes> nonce{};
  for (std::size_t i = 0; i < sizeof number_; ++i) {
    nonce[kNonceBytes - 1 - i] = static_cast<unsigned char>(number_ >> (8 * i));
  }
  ++number_;
  --left_;
  require(libcrypto_.cipher_init(context_.get(), nullptr, nullptr, nullptr, nonce.data(), -1) == 1);
  update(nullptr, head, kHeadBytes);
}

void RecordCipher::update(std::byte* out, const std::byte* in, std::size_t bytes) {
  int written = 0;
  require(libcrypto_.cipher_update(context_.get(), as_chars(out), &written, as_chars(in),
                                   static_cast<int>(bytes)) == 1 &&
          written == static_cast<int>(bytes));
}

RecordCipher::Sealed RecordCipher::seal(const iovec* parts, int count, std::byte* record) {
  std::size_t plain = 0;
  for (int i = 0; i < count; ++i) plain += std::min(parts[i].iov_len, kMostPlain - plain);
  if (plain == 0) return {};
  put_length(record, plain);
  begin_record(record);
  std::byte* out = record + kHeadBytes;
  std::size_t left = plain;
  for (int i = 0; i < count && left > 0; ++i) {
    const std::size_t bytes = std::min(parts[i].iov_len, left);
    if (bytes == 0) continue;
    update(out, static_cast<const std::byte*>(parts[i].iov_base), bytes);
    out += bytes;
    left -= bytes;
  }
  int none = 0;
  require(libcrypto_.cipher_final(context_.get(), as_chars(out), &none) == 1 && none == 0);
  require(libcrypto_.context_ctrl(context_.get(), kGetTag, kTagBytes, out) == 1);
  return {plain, kHeadBytes + plain + kTagBytes};
}

bool RecordCipher::open(const std::byte* record, std::byte* plain) {
  const std::size_t length = length_of(record);
  // EVP_CIPHER_CTX_ctrl takes the tag as memory that is not const.
  std::array<std::byte, kTagBytes> tag;
  std::memcpy(tag.data(), record + kHeadBytes + length, kTagBytes);
  begin_record(record);
  update(plain, record + kHeadBytes, length);
  require(libcrypto_.context_ctrl(context_.get(), kSetTag, kTagBytes, tag.data()) == 1);
  int none = 0;
  return libcrypto_.cipher_final(context_.get(), as_chars(plain) + length, &none) == 1;
}

}  // namespace horoplug
