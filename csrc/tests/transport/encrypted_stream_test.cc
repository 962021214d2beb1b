// Encrypted streams: what arrives is what was sent, or an error, whatever happens on the way.
#include "transport/encrypted/encrypted_stream.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <set>
#include <string>

#include "base/status.h"
#include "harness/cluster.h"
#include "harness/forwarding_stream.h"
#include "harness/libcrypto.h"
#include "transport/inproc/pipe.h"
#include "transport/link.h"

using namespace horoplug;
using testing::libcrypto;
using Direction = RecordCipher::Direction;

namespace {

using Key = std::array<unsigned char, RecordCipher::kKeyBytes>;

Key key_of(unsigned char number) {
  Key key;
  key.fill(number);
  return key;
}

std::unique_ptr<RecordCipher> cipher(Direction direction, const Key& key,
                                     RecordCipher::Numbering numbering = {}) {
  return std::make_unique<RecordCipher>(libcrypto(), direction, key, numbering);
}

Bytes random_bytes(std::size_t count, std::mt19937_64& random) {
  Bytes bytes(count);
  for (auto& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

// Keeps what is written, and returns what it is given, in pieces of random sizes.
class Wire final : public Stream {
 public:
  explicit Wire(std::uint64_t seed) : random_(seed) {}

  std::size_t write(const iovec* parts, int count) override {
    REQUIRE(count == 1);
    const std::size_t taken = std::min<std::size_t>(parts->iov_len, random_() % most_);
    const auto* const from = static_cast<const std::byte*>(parts->iov_base);
    bytes.insert(bytes.end(), from, from + taken);
    return taken;
  }
  std::ptrdiff_t read(void* data, std::size_t count) override {
    if (at == bytes.size()) return kEnd;
    const std::size_t taken = std::min({count, bytes.size() - at, std::size_t{random_() % most_}});
    std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(at), taken,
                static_cast<std::byte*>(data));
    at += taken;
    return static_cast<std::ptrdiff_t>(taken);
  }
  void close_write() override {}
  Traits traits() const override { return {WakeUp::kDoorbell}; }

  Bytes bytes;
  std::size_t at = 0;

 private:
  std::mt19937_64 random_;
  // At least two, because a call takes less than this many bytes, and some call must take one.
  std::size_t most_ = 2 + random_() % (100 << 10);
};

struct Ends {
  explicit Ends(std::uint64_t seed, RecordCipher::Numbering numbering = {}) : random(seed) {
    wire = new Wire(random());
    stream = std::make_unique<EncryptedStream>(
        std::unique_ptr<Stream>(wire), cipher(Direction::kSeal, key_of(1), numbering),
        cipher(Direction::kOpen, key_of(1), numbering), std::make_shared<RecordBuffers>());
  }

  // Writes all bytes, as Link does: a call is repeated until its bytes are taken.
  void write(Bytes data) {
    for (std::size_t done = 0; done < data.size();) {
      std::array<iovec, 2> parts;
      const std::size_t left = data.size() - done;
      const std::size_t first = random() % (std::min<std::size_t>(left, 100) + 1);
      parts[0] = {data.data() + done, first};
      parts[1] = {data.data() + done + first, left - first};
      done += stream->write(parts.data(), 2);
    }
  }

  // Reads until the end, and notes whether that is an error.
  Bytes read(std::size_t most = 200 << 10) {
    Bytes all;
    Bytes piece(most);
    tampered = false;
    try {
      for (;;) {
        const std::ptrdiff_t got = stream->read(piece.data(), 1 + random() % most);
        if (got == Stream::kEnd) break;
        all.insert(all.end(), piece.begin(), piece.begin() + got);
      }
    } catch (const TamperedError&) {
      tampered = true;
    }
    return all;
  }

  std::mt19937_64 random;
  Wire* wire;
  std::unique_ptr<EncryptedStream> stream;
  bool tampered = false;
};

// The records of a wire.
std::vector<Bytes> split(const Bytes& bytes) {
  std::vector<Bytes> records;
  for (std::size_t at = 0; at < bytes.size();) {
    const std::size_t size = RecordCipher::record_bytes(bytes.data() + at);
    const auto begin = bytes.begin() + static_cast<std::ptrdiff_t>(at);
    records.emplace_back(begin, begin + static_cast<std::ptrdiff_t>(size));
    at += size;
  }
  return records;
}

Bytes join(const std::vector<Bytes>& records) {
  Bytes all;
  for (const Bytes& record : records) all.insert(all.end(), record.begin(), record.end());
  return all;
}

bool is_proper_prefix(const Bytes& part, const Bytes& of) {
  return part.size() < of.size() && std::equal(part.begin(), part.end(), of.begin());
}

}  // namespace

TEST_CASE("an encrypted stream returns what was written, in any pieces") {
  std::mt19937_64 random(testing::test_seed());
  for (int round = 0; round < 30; ++round) {
    Ends ends(random(), {.records_per_key = 1 + random() % 5});
    Bytes sent;
    for (int i = 0; i < 8; ++i) {
      const Bytes data = random_bytes(1 + random() % (random() % 2 ? 200 : 300'000), random);
      ends.write(data);
      sent.insert(sent.end(), data.begin(), data.end());
    }
    CHECK(ends.read() == sent);
    CHECK(!ends.tampered);
  }
}

TEST_CASE("nothing of the data can be seen on the wire, and equal data looks different each time") {
  Ends ends(testing::test_seed());
  const Bytes text(48, std::byte{'x'});
  for (int i = 0; i < 50; ++i) ends.write(text);
  const std::vector<Bytes> records = split(ends.wire->bytes);
  CHECK(std::set<Bytes>(records.begin(), records.end()).size() == 50);
  const Bytes run(8, std::byte{'x'});
  CHECK(std::search(ends.wire->bytes.begin(), ends.wire->bytes.end(), run.begin(), run.end()) ==
        ends.wire->bytes.end());
}

TEST_CASE("each flipped bit of a record is noticed, and nothing of the record is returned") {
  std::mt19937_64 random(testing::test_seed());
  Ends sender(random());
  Bytes sent;
  for (int i = 0; i < 3; ++i) {
    const Bytes data = random_bytes(40, random);
    sender.write(data);
    sent.insert(sent.end(), data.begin(), data.end());
  }
  for (std::size_t bit = 0; bit < 8 * sender.wire->bytes.size(); ++bit) {
    Ends receiver(random());
    receiver.wire->bytes = sender.wire->bytes;
    receiver.wire->bytes[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
    const Bytes got = receiver.read();
    REQUIRE(is_proper_prefix(got, sent));
    REQUIRE(got.size() <= 40 * (bit / 8 / 60));
    // A larger length makes the receiver wait for bytes that do not come.
    REQUIRE((receiver.tampered || bit / 8 % 60 < RecordCipher::kHeadBytes));
  }
}

TEST_CASE("records that are repeated, left out, reordered or cut off are noticed") {
  std::mt19937_64 random(testing::test_seed());
  Ends sender(random());
  Bytes sent;
  for (int i = 0; i < 6; ++i) {
    const Bytes data = random_bytes(1 + random() % 1000, random);
    sender.write(data);
    sent.insert(sent.end(), data.begin(), data.end());
  }
  const std::vector<Bytes> records = split(sender.wire->bytes);
  REQUIRE(records.size() == 6);
  const auto receive = [&](const std::vector<Bytes>& changed) {
    Ends receiver(random());
    receiver.wire->bytes = join(changed);
    const Bytes got = receiver.read();
    CHECK(is_proper_prefix(got, sent));
    return receiver.tampered;
  };
  for (std::size_t i = 0; i + 1 < records.size(); ++i) {
    const auto at = static_cast<std::ptrdiff_t>(i);
    auto changed = records;
    changed.insert(changed.begin() + at, records[i]);
    CHECK(receive(changed));
    changed = records;
    changed.erase(changed.begin() + at);
    CHECK(receive(changed));
    changed = records;
    std::swap(changed[i], changed[i + 1]);
    CHECK(receive(changed));
  }
  // The engine notices the end: its peers say goodbye before they close.
  CHECK(!receive({records.begin(), records.end() - 1}));
  auto changed = records;
  changed.back().pop_back();
  CHECK(!receive(changed));
}

TEST_CASE("a record of another key does not open") {
  for (const bool same : {true, false}) {
    auto sealing = cipher(Direction::kSeal, key_of(1));
    auto opening = cipher(Direction::kOpen, key_of(same ? 1 : 2));
    std::string text = "text";
    const iovec part{text.data(), text.size()};
    Bytes record(RecordCipher::kMostRecord);
    CHECK(sealing->seal(&part, 1, record.data()).record == 24);
    CHECK(opening->open(record.data(), record.data() + RecordCipher::kHeadBytes) == same);
  }
}

namespace {

// The keys and nonces with which libcrypto was called.
std::set<std::pair<Key, std::string>> used;
Key current;
bool repeated = false;

int note_nonce(Libcrypto::CipherContext* context, const Libcrypto::Cipher* of,
               Libcrypto::Engine* engine, const unsigned char* key, const unsigned char* nonce,
               int seals) {
  if (key != nullptr) std::copy_n(key, current.size(), current.begin());
  if (nonce != nullptr) {
    const std::string text(reinterpret_cast<const char*>(nonce), 12);
    repeated |= !used.emplace(current, text).second;
  }
  return libcrypto().cipher_init(context, of, engine, key, nonce, seals);
}

}  // namespace

TEST_CASE("no nonce is used twice with a key, and keys are replaced") {
  Libcrypto noted = libcrypto();
  noted.cipher_init = note_nonce;
  RecordCipher sealing(noted, Direction::kSeal, key_of(7), {.records_per_key = 10});
  std::string text = "text";
  const iovec part{text.data(), text.size()};
  Bytes record(RecordCipher::kMostRecord);
  for (int i = 0; i < 1000; ++i) sealing.seal(&part, 1, record.data());
  CHECK(!repeated);
  CHECK(used.size() == 1000);
  std::set<Key> keys;
  for (const auto& [key, nonce] : used) keys.insert(key);
  CHECK(keys.size() == 100);
}

TEST_CASE("a cipher without numbers left refuses to work") {
  constexpr std::uint64_t kLast = std::numeric_limits<std::uint64_t>::max();
  auto sealing = cipher(Direction::kSeal, key_of(1), {.first = kLast - 1});
  auto opening = cipher(Direction::kOpen, key_of(1), {.first = kLast - 1});
  std::string text = "text";
  const iovec part{text.data(), text.size()};
  Bytes record(RecordCipher::kMostRecord);
  Bytes plain(RecordCipher::kMostPlain);
  sealing->seal(&part, 1, record.data());
  CHECK(opening->open(record.data(), plain.data()));
  CHECK(testing::failure_of([&] { sealing->seal(&part, 1, record.data()); }).code == HP_INTERNAL);
  CHECK(testing::failure_of([&] { opening->open(record.data(), plain.data()); }).code ==
        HP_INTERNAL);
}

TEST_CASE("a link reads all that its encrypted stream has taken from the descriptor") {
  auto bell = std::make_shared<Doorbell>();
  auto [one, two] = make_inproc_pipe(bell, bell);
  auto buffers = std::make_shared<RecordBuffers>();
  const auto encrypt = [&](std::unique_ptr<Stream> stream, unsigned char out, unsigned char in) {
    return std::make_unique<EncryptedStream>(std::move(stream),
                                             cipher(Direction::kSeal, key_of(out)),
                                             cipher(Direction::kOpen, key_of(in)), buffers);
  };
  int received = 0;
  Link a(1, encrypt(std::move(one), 1, 2), [](int, const Bytes&) {});
  auto stream = encrypt(std::move(two), 2, 1);
  EncryptedStream& incoming = *stream;
  // What tests put around a stream forwards has_more(), too.
  auto around = std::make_unique<testing::ForwardingStream>(std::move(stream));
  Link b(0, std::move(around), [&](int, const Bytes&) { ++received; });
  // More frames than reads per call, all of which arrive in one piece.
  for (int i = 0; i < 200; ++i) a.send_control(Bytes(100));
  while (a.pump_write()) {
  }
  while (b.pump_read()) CHECK(!incoming.has_more());
  CHECK(received == 200);
  CHECK(!b.failure());
}

namespace {

// Changes one byte of what passes.
class Flipping final : public testing::ForwardingStream {
 public:
  Flipping(std::unique_ptr<Stream> stream, std::size_t at)
      : ForwardingStream(std::move(stream)), at_(at) {}
  std::ptrdiff_t read(void* data, std::size_t bytes) override {
    const std::ptrdiff_t got = ForwardingStream::read(data, bytes);
    if (got <= 0) return got;
    const auto count = static_cast<std::size_t>(got);
    if (at_ < count) static_cast<std::byte*>(data)[at_] ^= std::byte{1};
    at_ -= std::min(at_, count);
    if (at_ == 0) at_ = std::numeric_limits<std::size_t>::max();
    return got;
  }

 private:
  std::size_t at_;
};

// Encrypts all connections between hosts. `flip`: the byte from rank 1 to rank 0 that is changed on
// the first connection.
std::vector<EngineConfig> encrypted(std::vector<EngineConfig> configs, std::size_t flip = 0) {
  for (EngineConfig& config : configs) {
    auto buffers = std::make_shared<RecordBuffers>();
    const int here = config.members[static_cast<std::size_t>(config.rank)].host;
    for (int peer = 0; peer < config.size(); ++peer) {
      Member& member = config.members[static_cast<std::size_t>(peer)];
      if (member.host == here) continue;
      unsigned char lane = 0;
      const auto encrypt = [&](std::unique_ptr<Stream>& stream) {
        const auto key = [&](int from, int to) {
          return key_of(static_cast<unsigned char>(64 * from + 8 * to + lane));
        };
        if (flip > 0 && lane == 0 && config.rank == 0 && peer == 1) {
          stream = std::make_unique<Flipping>(std::move(stream), flip);
        }
        stream = std::make_unique<EncryptedStream>(
            std::move(stream), cipher(Direction::kSeal, key(config.rank, peer)),
            cipher(Direction::kOpen, key(peer, config.rank)), buffers);
        ++lane;
      };
      encrypt(member.stream);
      for (auto& stream : member.lanes) encrypt(stream);
    }
  }
  return configs;
}

}  // namespace

TEST_CASE("engines reduce over encrypted connections") {
  for (const auto transport : {testing::Transport::kTcp, testing::Transport::kMixed}) {
    CAPTURE(testing::transport_name(transport));
    auto configs = testing::make_configs(transport, 4, testing::test_options(), 2);
    testing::Cluster cluster(encrypted(std::move(configs)));
    cluster.run([&](int rank) {
      for (const std::int64_t elements : {1, 1000, 300'000}) {
        for (int step = 0; step < 6; ++step) {
          std::vector<float> data(static_cast<std::size_t>(elements), static_cast<float>(rank));
          testing::perform(cluster.engine(rank), {.name = "x" + std::to_string(elements),
                                                  .shape = {elements},
                                                  .input = data.data(),
                                                  .output = data.data()});
          REQUIRE(std::all_of(data.begin(), data.end(), [](float x) { return x == 6; }));
        }
      }
    });
  }
}

TEST_CASE("a changed byte on an encrypted connection ends the job, and the error names the peer") {
  auto configs = testing::make_configs(testing::Transport::kTcp, 2, testing::test_options());
  testing::Cluster cluster(encrypted(std::move(configs), 200'000));
  cluster.run([&](int rank) {
    std::vector<float> data(300'000, 1);
    const Status status = testing::failure_of([&] {
      testing::perform(
          cluster.engine(rank),
          {.name = "x", .shape = {300'000}, .input = data.data(), .output = data.data()});
    });
    CHECK(status.code == HP_ABORTED);
    CAPTURE(status.message);
    if (rank == 0)
      CHECK(status.message.find("rank 1: its data does not authenticate") != std::string::npos);
  });
}
