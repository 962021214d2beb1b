// Bounds-checked little-endian encoding of control messages.
//
// A Reader never reads past its input and never allocates more than the input could hold. Malformed
// input ends in a WireError.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace horoplug {

static_assert(std::endian::native == std::endian::little, "big-endian hosts need byte swaps here");

using Bytes = std::vector<std::byte>;

class WireError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class Writer {
 public:
  template <typename T>
    requires(std::is_arithmetic_v<T> || std::is_enum_v<T>)
  void put(T value) {
    const auto* begin = reinterpret_cast<const std::byte*>(&value);
    bytes_.insert(bytes_.end(), begin, begin + sizeof value);
  }

  // Encodes an unsigned integer in groups of 7 bits: the ids of names and dimensions are mostly
  // small.
  void put_varint(std::uint64_t value) {
    while (value >= 0x80) {
      put(static_cast<std::uint8_t>(value | 0x80));
      value >>= 7;
    }
    put(static_cast<std::uint8_t>(value));
  }

  void put_string(const std::string& text) {
    put_varint(text.size());
    const auto* begin = reinterpret_cast<const std::byte*>(text.data());
    bytes_.insert(bytes_.end(), begin, begin + text.size());
  }

  void put_bytes(std::span<const std::byte> bytes) {
    put_varint(bytes.size());
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  }

  Bytes take() { return std::move(bytes_); }
  std::size_t size() const { return bytes_.size(); }

 private:
  Bytes bytes_;
};

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : rest_(bytes) {}

  template <typename T>
    requires(std::is_arithmetic_v<T>)
  T get() {
    T value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }

  // Reads an enumeration whose values are 0 to count - 1.
  template <typename T>
    requires(std::is_enum_v<T>)
  T get_enum(int count) {
    const auto value = get<std::underlying_type_t<T>>();
    if (static_cast<std::uint64_t>(value) >= static_cast<std::uint64_t>(count)) {
      throw WireError("value out of range");
    }
    return static_cast<T>(value);
  }

  std::uint64_t get_varint() {
    std::uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const auto group = get<std::uint8_t>();
      value |= static_cast<std::uint64_t>(group & 0x7F) << shift;
      if ((group & 0x80) == 0) {
        if (shift == 63 && group > 1) break;
        return value;
      }
    }
    throw WireError("number too long");
  }

  // Reads a count of items of at least `least` bytes each, and checks it against the remaining
  // input.
  std::size_t get_count(std::size_t least) {
    const std::uint64_t value = get_varint();
    if (value > rest_.size() / least) throw WireError("count exceeds the message");
    return static_cast<std::size_t>(value);
  }

  std::string get_string() {
    const auto text = take(get_count(1));
    return {reinterpret_cast<const char*>(text.data()), text.size()};
  }

  Bytes get_bytes() {
    const auto bytes = take(get_count(1));
    return {bytes.begin(), bytes.end()};
  }

  bool empty() const { return rest_.empty(); }
  void expect_end() const {
    if (!rest_.empty()) throw WireError("unexpected bytes after the message");
  }

 private:
  std::span<const std::byte> take(std::size_t bytes) {
    if (bytes > rest_.size()) throw WireError("message too short");
    const auto head = rest_.first(bytes);
    rest_ = rest_.subspan(bytes);
    return head;
  }

  std::span<const std::byte> rest_;
};

}  // namespace horoplug
