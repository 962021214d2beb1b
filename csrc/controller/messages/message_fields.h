// The encoding of control messages. One function for each struct, fields(archive, struct), lists
// the fields in order: an Encoder appends them to a message, and a Decoder reads and validates them
// and throws WireError. Only the files that encode messages include this.
#pragma once

#include <concepts>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "base/time.h"
#include "base/wire.h"
#include "controller/messages/messages.h"
#include "controller/state/plan_choice.h"
#include "controller/state/rank_ranges.h"
#include "controller/state/signature.h"

namespace horoplug {

inline constexpr int kMaxRank = std::numeric_limits<std::int32_t>::max() - 1;
// Far beyond any model. It keeps a forged bit field from allocating much memory.
inline constexpr std::uint32_t kMaxId = 1 << 26;

// The struct of fields(): Struct to decode, and const Struct to encode.
template <typename T, typename Struct>
concept Is = std::same_as<std::remove_const_t<T>, Struct>;

// What an archive remembers of a message. Successive names mostly differ in a few characters, and
// successive signatures and sets of ranks are mostly equal. A name is encoded by the prefix and
// suffix that it shares with the name before it, and a signature, a set of ranks or the batches of
// a plan that equal their predecessor by one byte.
//
// All are limited, so that the memory that a message takes is bounded by a multiple of its length:
// a name shares at most kMostShared characters at each end, and after a number of repetitions that
// falls with its size a value is encoded again.
class Predecessors {
 protected:
  static constexpr std::size_t kMostShared = 255;

  template <typename T>
  struct Last {
    void set(const T& to);

    std::optional<T> value;
    std::size_t repetitions_left = 0;
  };

  template <typename T>
  Last<T>& last() {
    return std::get<Last<T>>(values_);
  }

  std::string name_;

 private:
  std::tuple<Last<Signature>, Last<RankRanges>, Last<PlanContents>> values_;
};

class Encoder : Predecessors {
 public:
  static constexpr bool kDecodes = false;

  Encoder(MessageKind kind, std::uint32_t set);

  // Fields whose types say how they are encoded.
  template <typename... Fields>
  void operator()(const Fields&... values) {
    (put(values), ...);
  }
  // A number or an enumerator from `least` to `most`.
  template <typename T>
  void number(T value, std::int64_t /*most*/, std::int64_t least = 0) {
    writer_.put_varint(static_cast<std::uint64_t>(static_cast<std::int64_t>(value) - least));
  }
  // At most `most` items of at least `least_bytes` bytes each.
  template <typename Item>
  void list(const std::vector<Item>& items, std::size_t /*least_bytes*/,
            std::size_t /*most*/ = std::numeric_limits<std::size_t>::max()) {
    writer_.put_varint(items.size());
    for (const Item& item : items) put(item);
  }
  // Ascending ids, as a bit field that starts at the byte of the smallest one.
  void bits(const std::vector<std::uint32_t>& ids);
  // The name of an operation.
  void name(const std::string& name);
  // A value that mostly equals the one of its type before it.
  template <typename T>
  void again(const T& value) {
    auto& last = this->template last<T>();
    const bool is_same = last.repetitions_left > 0 && *last.value == value;
    put(is_same);
    if (is_same) {
      --last.repetitions_left;
    } else {
      put(value);
      last.set(value);
    }
  }
  void check(bool /*valid*/, const char* /*error*/) {}
  void ignore_rest() {}

  Bytes take() { return writer_.take(); }

 private:
  void put(bool value) { writer_.put(static_cast<std::uint8_t>(value)); }
  void put(std::int32_t value) { writer_.put(value); }
  void put(std::uint32_t value) { writer_.put_varint(value); }
  void put(std::uint64_t value) { writer_.put_varint(value); }
  void put(std::int64_t dimension) { number(dimension, dimension); }
  void put(double value) { writer_.put(value); }
  void put(Seconds value) { writer_.put(value.count()); }
  void put(hp_status failure) { number(failure, HP_STATUS_COUNT - 1); }
  void put(const std::string& text) { writer_.put_string(text); }
  void put(const Bytes& bytes) { writer_.put_bytes(bytes); }
  void put(const Shape& shape) { list(shape, 1); }
  void put(const std::vector<std::uint32_t>& ids) { list(ids, 1); }
  void put(const RankRanges& ranks);
  void put(const std::map<std::uint32_t, RankRanges>& by_number);
  template <typename Struct>
  void put(const Struct& value) {
    fields(*this, value);
  }

  Writer writer_;
};

// Its functions are those of the Encoder.
class Decoder : Predecessors {
 public:
  static constexpr bool kDecodes = true;

  explicit Decoder(Reader& reader) : reader_(reader) {}

  template <typename... Fields>
  void operator()(Fields&... values) {
    (get(values), ...);
  }
  template <typename T>
  void number(T& value, std::int64_t most, std::int64_t least = 0) {
    const std::uint64_t distance = reader_.get_varint();
    check(distance <= static_cast<std::uint64_t>(most - least), "number out of range");
    value = static_cast<T>(least + static_cast<std::int64_t>(distance));
  }
  template <typename Item>
  void list(std::vector<Item>& items, std::size_t least_bytes,
            std::size_t most = std::numeric_limits<std::size_t>::max()) {
    const std::size_t count = reader_.get_count(least_bytes);
    check(count <= most, "too many items");
    items.resize(count);
    for (Item& item : items) get(item);
  }
  void bits(std::vector<std::uint32_t>& ids);
  void name(std::string& name);
  template <typename T>
  void again(T& value) {
    auto& last = this->template last<T>();
    bool is_same = false;
    get(is_same);
    if (is_same) {
      check(last.value.has_value(), "the first value refers to a predecessor");
      check(last.repetitions_left > 0, "a value is repeated too often");
      --last.repetitions_left;
      value = *last.value;
    } else {
      get(value);
      last.set(value);
    }
  }
  void check(bool valid, const char* error) {
    if (!valid) throw WireError(error);
  }
  // For a message of another version of the protocol.
  void ignore_rest() { reader_ = Reader({}); }

 private:
  void get(bool& value) { number(value, 1); }
  void get(std::int32_t& value) { value = reader_.get<std::int32_t>(); }
  void get(std::uint32_t& value) { number(value, std::numeric_limits<std::uint32_t>::max()); }
  void get(std::uint64_t& value) { value = reader_.get_varint(); }
  void get(std::int64_t& dimension) { number(dimension, std::numeric_limits<std::int64_t>::max()); }
  void get(double& value) { value = reader_.get<double>(); }
  void get(Seconds& value);
  void get(hp_status& failure);
  void get(std::string& text) { text = reader_.get_string(); }
  void get(Bytes& bytes) { bytes = reader_.get_bytes(); }
  void get(Shape& shape) { list(shape, 1); }
  void get(std::vector<std::uint32_t>& ids);
  void get(RankRanges& ranks);
  void get(std::map<std::uint32_t, RankRanges>& by_number);
  template <typename Struct>
  void get(Struct& value) {
    fields(*this, value);
  }

  Reader& reader_;
};

void fields(auto& archive, Is<Signature> auto& signature) {
  archive.number(signature.op, kOpKindCount - 1);
  archive.number(signature.dtype, kDTypeCount - 1);
  std::int32_t wire = signature.wire_code();
  archive.number(wire, std::numeric_limits<std::uint8_t>::max());
  if constexpr (std::remove_reference_t<decltype(archive)>::kDecodes) {
    if (wire != signature.wire_code()) {
      signature.wire = find_wire_format(wire);
      archive.check(signature.wire != nullptr && signature.dtype == DType::kFloat32,
                    "unknown wire format");
    }
  }
  archive.number(signature.reduce, kReduceOpCount - 1);
  archive(signature.root, signature.device, signature.prescale, signature.postscale,
          signature.recurring, signature.layout);
  archive.check(signature.layout.size() <= kLongestName, "layout too long");
  archive.list(signature.shapes, 1);
}

// The slots of a step, by batch.
void fields(auto& archive, Is<PlanContents> auto& batches) {
  archive.list(batches, 2);
  archive.check(!batches.empty(), "plan without batches");
  for (const auto& slots : batches) archive.check(!slots.empty(), "plan with an empty batch");
}

// Definitions of the templates that messages.h declares. The files that define fields() of messages
// instantiate them.
template <typename Message>
Bytes encode(MessageKind kind, std::uint32_t set, const Message& message) {
  Encoder encoder(kind, set);
  encoder(message);
  return encoder.take();
}

template <typename Message>
Message decode(Reader& reader) {
  Message message;
  Decoder decoder(reader);
  decoder(message);
  reader.expect_end();
  return message;
}

}  // namespace horoplug
