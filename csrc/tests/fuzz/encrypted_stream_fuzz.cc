// Fuzz target for what arrives on an encrypted connection. The input edits the bytes of some sealed
// records: it changes, removes, repeats and adds bytes. Whatever it does, the reader gets a prefix
// of what was sealed.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <numeric>

#include "tests/harness/libcrypto.h"
#include "transport/encrypted/encrypted_stream.h"

using namespace horoplug;

namespace {

constexpr unsigned char kKey[RecordCipher::kKeyBytes] = {1, 2, 3};

std::unique_ptr<RecordCipher> cipher(RecordCipher::Direction direction) {
  return std::make_unique<RecordCipher>(testing::libcrypto(), direction, RecordCipher::Key(kKey),
                                        RecordCipher::Numbering{.records_per_key = 2});
}

class Wire final : public Stream {
 public:
  explicit Wire(Bytes bytes) : bytes_(std::move(bytes)) {}
  std::size_t write(const iovec* /*parts*/, int /*count*/) override { return 0; }
  std::ptrdiff_t read(void* to, std::size_t most) override {
    if (at_ == bytes_.size()) return kEnd;
    const std::size_t count = std::min({most, bytes_.size() - at_, std::size_t{1} + at_ % 61});
    std::copy_n(bytes_.data() + at_, count, static_cast<std::byte*>(to));
    at_ += count;
    return static_cast<std::ptrdiff_t>(count);
  }
  void close_write() override {}
  Traits traits() const override { return {WakeUp::kDoorbell}; }

 private:
  const Bytes bytes_;
  std::size_t at_ = 0;
};

struct Sealed {
  Bytes plain = Bytes(300);
  Bytes records;
};

const Sealed& sealed() {
  static const Sealed made = [] {
    Sealed all;
    std::iota(reinterpret_cast<unsigned char*>(all.plain.data()),
              reinterpret_cast<unsigned char*>(all.plain.data()) + all.plain.size(), 0);
    const auto sealing = cipher(RecordCipher::Direction::kSeal);
    Bytes record(RecordCipher::kMostRecord);
    std::size_t at = 0;
    for (const std::size_t size : {1, 40, 100, 9, 150}) {
      const iovec part{all.plain.data() + at, size};
      const auto bytes = sealing->seal(&part, 1, record.data()).record;
      all.records.insert(all.records.end(), record.begin(),
                         record.begin() + static_cast<std::ptrdiff_t>(bytes));
      at += size;
    }
    return all;
  }();
  return made;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Bytes bytes = sealed().records;
  for (; size >= 4; data += 4, size -= 4) {  // what to do, where (two bytes), and a value
    const auto at = static_cast<std::ptrdiff_t>((data[1] | data[2] << 8) % (bytes.size() + 1));
    const auto rest = static_cast<std::ptrdiff_t>(bytes.size()) - at;
    const std::ptrdiff_t count = std::min<std::ptrdiff_t>(data[3], rest);
    const Bytes part(bytes.begin() + at, bytes.begin() + at + count);
    if (data[0] % 4 == 0 && rest > 0) {
      bytes[static_cast<std::size_t>(at)] ^= std::byte{data[3]};
    } else if (data[0] % 4 == 1) {
      bytes.erase(bytes.begin() + at, bytes.begin() + at + count);
    } else if (data[0] % 4 == 2 && bytes.size() < 10'000) {
      bytes.insert(bytes.begin() + at, part.begin(), part.end());
    } else {
      bytes.insert(bytes.begin() + at, std::byte{data[3]});
    }
  }
  EncryptedStream stream(std::make_unique<Wire>(std::move(bytes)), nullptr,
                         cipher(RecordCipher::Direction::kOpen), std::make_shared<RecordBuffers>());
  Bytes got;
  Bytes piece(64);
  try {
    for (;;) {
      const std::ptrdiff_t count = stream.read(piece.data(), 1 + got.size() % piece.size());
      if (count == Stream::kEnd) break;
      got.insert(got.end(), piece.begin(), piece.begin() + count);
    }
  } catch (const TamperedError&) {
  }
  const Bytes& plain = sealed().plain;
  if (got.size() > plain.size() || !std::equal(got.begin(), got.end(), plain.begin())) std::abort();
  return 0;
}
