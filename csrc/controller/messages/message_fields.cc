#include "controller/messages/message_fields.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace horoplug {
namespace {

// How much memory a value takes, in parts that take at least a byte each in a message.
std::size_t parts_of(const Signature& signature) {
  std::size_t parts = 1 + signature.shapes.size() + signature.layout.size();
  for (const Shape& shape : signature.shapes) parts += shape.size();
  return parts;
}

std::size_t parts_of(const RankRanges& ranks) { return 1 + ranks.ranges().size(); }

std::size_t parts_of(const PlanContents& batches) {
  std::size_t parts = 1 + batches.size();
  for (const auto& slots : batches) parts += slots.size();
  return parts;
}

// The numbers of characters, at most `most` each, that two names share at their ends.
std::pair<std::size_t, std::size_t> shared(const std::string& a, const std::string& b,
                                           std::size_t most) {
  const std::size_t length = std::min(a.size(), b.size());
  std::size_t head = 0;
  while (head < std::min(length, most) && a[head] == b[head]) ++head;
  std::size_t tail = 0;
  while (tail < std::min(length - head, most) && a[a.size() - 1 - tail] == b[b.size() - 1 - tail]) {
    ++tail;
  }
  return {head, tail};
}

}  // namespace

// A value of n parts takes at least n bytes once and one byte in each repetition, so that
// kRepeated / n repetitions expand a message by a constant factor.
template <typename T>
void Predecessors::Last<T>::set(const T& to) {
  constexpr std::size_t kRepeated = 4096;
  constexpr std::size_t kFewest = 8;
  repetitions_left = std::max(kFewest, kRepeated / parts_of(to));
  value = to;
}

template struct Predecessors::Last<Signature>;
template struct Predecessors::Last<RankRanges>;
template struct Predecessors::Last<PlanContents>;

Encoder::Encoder(MessageKind kind, std::uint32_t set) {
  writer_.put(kind);
  writer_.put_varint(set);
}

void Decoder::get(Seconds& value) {
  const auto seconds = reader_.get<double>();
  check(std::isfinite(seconds) && seconds >= 0, "invalid duration");
  value = Seconds(seconds);
}

// HP_OK and HP_IN_PROGRESS are refused: operations would end as successes.
void Decoder::get(hp_status& failure) {
  number(failure, HP_STATUS_COUNT - 1);
  check(failure != HP_OK && failure != HP_IN_PROGRESS, "a failure without an error code");
}

void Decoder::get(std::vector<std::uint32_t>& ids) {
  ids.resize(reader_.get_count(1));
  for (std::uint32_t& id : ids) number(id, kMaxId);
}

// Each range by its distance from the one before, and its length.
void Encoder::put(const RankRanges& ranks) {
  writer_.put_varint(ranks.ranges().size());
  int next = 0;
  for (const auto& range : ranks.ranges()) {
    number(range.first, kMaxRank, next);
    number(range.last, kMaxRank, range.first);
    next = range.last + 1;
  }
}

void Decoder::get(RankRanges& ranks) {
  std::vector<RankRanges::Range> ranges(reader_.get_count(2));
  int next = 0;
  for (auto& range : ranges) {
    number(range.first, kMaxRank, next);
    number(range.last, kMaxRank, range.first);
    check(&range == &ranges.back() || range.last < kMaxRank, "rank out of range");
    next = range.last + 1;
  }
  ranks = RankRanges(std::move(ranges));
}

void Encoder::put(const std::map<std::uint32_t, RankRanges>& by_number) {
  writer_.put_varint(by_number.size());
  for (const auto& [number, ranks] : by_number) (*this)(number, ranks);
}

void Decoder::get(std::map<std::uint32_t, RankRanges>& by_number) {
  for (std::size_t left = reader_.get_count(2); left > 0; --left) {
    std::uint32_t number = 0;
    RankRanges ranks;
    (*this)(number, ranks);
    by_number[number].add(ranks);
  }
}

void Encoder::bits(const std::vector<std::uint32_t>& ids) {
  if (ids.empty()) {
    writer_.put_varint(0);
    return;
  }
  const std::uint32_t base = ids.front() / 8;
  std::vector<std::uint8_t> bits(ids.back() / 8 - base + 1);
  for (const std::uint32_t id : ids) bits[id / 8 - base] |= static_cast<std::uint8_t>(1 << id % 8);
  writer_.put_varint(bits.size());
  writer_.put_varint(base);
  for (const std::uint8_t byte : bits) writer_.put(byte);
}

void Decoder::bits(std::vector<std::uint32_t>& ids) {
  const std::size_t size = reader_.get_count(1);
  if (size == 0) return;
  std::uint32_t base = 0;
  number(base, kMaxId / 8);
  for (std::size_t i = 0; i < size; ++i) {
    const auto byte = reader_.get<std::uint8_t>();
    for (std::uint32_t bit = 0; bit < 8; ++bit) {
      if ((byte >> bit & 1) != 0) ids.push_back((base + static_cast<std::uint32_t>(i)) * 8 + bit);
    }
  }
}

void Encoder::name(const std::string& name) {
  const auto [head, tail] = shared(name, name_, kMostShared);
  writer_.put_varint(head);
  writer_.put_varint(tail);
  writer_.put_string(name.substr(head, name.size() - head - tail));
  name_ = name;
}

void Decoder::name(std::string& name) {
  const std::uint64_t head = reader_.get_varint();
  const std::uint64_t tail = reader_.get_varint();
  check(head <= name_.size() && tail <= name_.size() - head,
        "a name shares more characters than its predecessor has");
  check(head <= kMostShared && tail <= kMostShared, "a name shares too many characters");
  name_ = name_.substr(0, head) + reader_.get_string() + name_.substr(name_.size() - tail);
  check(!name_.empty(), "empty operation name");
  check(name_.size() <= kLongestName, "operation name too long");
  name = name_;
}

}  // namespace horoplug
