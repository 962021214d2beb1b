// Seals or opens the records of one direction of one connection.
//
//   record: length u32, ciphertext (length bytes), tag (16 bytes)        AES-256-GCM
//
// The length, little-endian, is authenticated, too (additional data). The nonce is the record's
// number, which is not sent: both sides count. So a record that was changed, repeated, left out or
// reordered, or that belongs to another connection or direction, does not open.
//
// No nonce is used twice with a key: each direction of each connection has a key of its own, and
// numbers only grow. After a fixed number of records, both sides replace the key by
// HMAC-SHA256(key, "horoplug next key"). This bounds what is encrypted with one key, and an old
// key cannot be computed from a newer one.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/wire.h"
#include "transport/encrypted/libcrypto.h"

namespace horoplug {

class RecordCipher {
 public:
  static constexpr std::size_t kKeyBytes = 32;
  static constexpr std::size_t kHeadBytes = 4;
  static constexpr std::size_t kTagBytes = 16;
  static constexpr std::size_t kMostPlain = 64 << 10;
  static constexpr std::size_t kMostRecord = kHeadBytes + kMostPlain + kTagBytes;

  enum class Direction { kOpen = 0, kSeal = 1 };
  using Key = std::span<const unsigned char, kKeyBytes>;

  struct Numbering {
    // 2^20 records have 2^32 blocks, for which AES-GCM's margin is 2^-64.
    std::uint64_t records_per_key = 1 << 20;
    std::uint64_t first = 0;  // other values are for tests
  };

  // Copies the key. Throws Error if libcrypto fails.
  RecordCipher(const Libcrypto& libcrypto, Direction direction, Key key, Numbering numbering);
  RecordCipher(const Libcrypto& libcrypto, Direction direction, Key key)
      : RecordCipher(libcrypto, direction, key, Numbering()) {}
  ~RecordCipher();
  RecordCipher(const RecordCipher&) = delete;
  RecordCipher& operator=(const RecordCipher&) = delete;

  // The size of the record that `head`, the first kHeadBytes of a record, announces. 0: no record
  // has such a head.
  static std::size_t record_bytes(const std::byte* head);

  struct Sealed {
    std::size_t plain = 0;   // bytes of the parts that the record contains
    std::size_t record = 0;  // size of the record
  };
  // Seals the first kMostPlain bytes of `parts`, or all if they are fewer, into `record`, which has
  // room for kMostRecord bytes. Throws Error.
  Sealed seal(const iovec* parts, int count, std::byte* record);

  // Opens a record of record_bytes(record) bytes. `plain` may be record + kHeadBytes. Returns false
  // if the record is not authentic; what was written to `plain` must not be used then.
  bool open(const std::byte* record, std::byte* plain);

 private:
  struct Free {
    void (*free)(Libcrypto::CipherContext*);
    void operator()(Libcrypto::CipherContext* context) const { free(context); }
  };

  void use_key();
  void replace_key();
  void begin_record(const std::byte* head);
  void update(std::byte* out, const std::byte* in, std::size_t bytes);

  const Libcrypto libcrypto_;
  const Direction direction_;
  const std::uint64_t records_per_key_;
  std::uint64_t number_;  // of the next record
  std::uint64_t left_;    // records until the key is replaced
  std::array<unsigned char, kKeyBytes> key_;
  std::unique_ptr<Libcrypto::CipherContext, Free> context_;
};

}  // namespace horoplug
