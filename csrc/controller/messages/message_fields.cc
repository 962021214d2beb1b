#include "controller/messages/message_fields.h"

#include <algorithm>
#include <cmath>

namespace horoplug {
namespace {

void put_signature(Writer& writer, const Signature& signature) {
  writer.put(signature.op);
  writer.put(signature.dtype);
  writer.put(static_cast<std::uint8_t>(signature.wire_code()));
  writer.put(signature.reduce);
  writer.put(signature.root);
  writer.put(signature.device);
  writer.put(signature.prescale);
  writer.put(signature.postscale);
  writer.put(static_cast<std::uint8_t>(signature.recurring));
  writer.put_string(signature.layout);
  writer.put_varint(signature.shapes.size());
  for (const Shape& shape : signature.shapes) {
    writer.put_varint(shape.size());
    for (const std::int64_t dimension : shape) {
      writer.put_varint(static_cast<std::uint64_t>(dimension));
    }
  }
}

Signature get_signature(Reader& reader) {
  Signature signature;
  signature.op = reader.get_enum<OpKind>(kOpKindCount);
  signature.dtype = reader.get_enum<DType>(kDTypeCount);
  const std::int32_t wire = reader.get<std::uint8_t>();
  if (wire != signature.wire_code()) {
    signature.wire = find_wire_format(wire);
    if (signature.wire == nullptr || signature.dtype != DType::kFloat32) {
      throw WireError("unknown wire format");
    }
  }
  signature.reduce = reader.get_enum<ReduceOp>(kReduceOpCount);
  signature.root = reader.get<std::int32_t>();
  signature.device = reader.get<std::int32_t>();
  signature.prescale = reader.get<double>();
  signature.postscale = reader.get<double>();
  signature.recurring = get_bool(reader);
  signature.layout = reader.get_string();
  if (signature.layout.size() > kLongestName) throw WireError("layout too long");
  signature.shapes.resize(reader.get_count(1));
  for (Shape& shape : signature.shapes) {
    shape.resize(reader.get_count(1));
    for (std::int64_t& dimension : shape) {
      const std::uint64_t value = reader.get_varint();
      if (value > std::numeric_limits<std::int64_t>::max()) throw WireError("dimension too large");
      dimension = static_cast<std::int64_t>(value);
    }
  }
  return signature;
}

}  // namespace

Writer begin_message(MessageKind kind, std::uint32_t set) {
  Writer writer;
  writer.put(kind);
  writer.put_varint(set);
  return writer;
}

std::uint32_t get_u32(Reader& reader) {
  const std::uint64_t value = reader.get_varint();
  if (value > std::numeric_limits<std::uint32_t>::max()) throw WireError("number out of range");
  return static_cast<std::uint32_t>(value);
}

bool get_bool(Reader& reader) {
  const auto value = reader.get<std::uint8_t>();
  if (value > 1) throw WireError("invalid boolean");
  return value == 1;
}

hp_status get_failure(Reader& reader) {
  const auto code = static_cast<hp_status>(reader.get_int(HP_INTERNAL));
  if (code == HP_OK || code == HP_IN_PROGRESS) throw WireError("a failure without an error code");
  return code;
}

Seconds get_seconds(Reader& reader) {
  const auto value = reader.get<double>();
  if (!std::isfinite(value) || value < 0) throw WireError("invalid duration");
  return Seconds(value);
}

// Each range by its distance from the one before, and its length.
void put_ranges(Writer& writer, const RankRanges& ranks) {
  writer.put_varint(ranks.ranges().size());
  int next = 0;
  for (const auto& range : ranks.ranges()) {
    writer.put_varint(static_cast<std::uint64_t>(range.first - next));
    writer.put_varint(static_cast<std::uint64_t>(range.last - range.first));
    next = range.last + 1;
  }
}

RankRanges get_ranges(Reader& reader) {
  std::vector<RankRanges::Range> ranges(reader.get_count(2));
  int next = 0;
  for (auto& range : ranges) {
    range.first = next + reader.get_int(kMaxRank - next);
    range.last = range.first + reader.get_int(kMaxRank - range.first);
    if (&range != &ranges.back() && range.last == kMaxRank) throw WireError("rank out of range");
    next = range.last + 1;
  }
  return RankRanges(std::move(ranges));
}

void put_numbers(Writer& writer, const std::vector<std::uint32_t>& numbers) {
  writer.put_varint(numbers.size());
  for (const std::uint32_t number : numbers) writer.put_varint(number);
}

std::vector<std::uint32_t> get_numbers(Reader& reader) {
  std::vector<std::uint32_t> numbers(reader.get_count(1));
  for (auto& number : numbers) number = static_cast<std::uint32_t>(reader.get_int(kMaxId));
  return numbers;
}

void put_bits(Writer& writer, const std::vector<std::uint32_t>& ids) {
  if (ids.empty()) {
    writer.put_varint(0);
    return;
  }
  const std::uint32_t base = ids.front() / 8;
  std::vector<std::uint8_t> bits(ids.back() / 8 - base + 1);
  for (const std::uint32_t id : ids) bits[id / 8 - base] |= static_cast<std::uint8_t>(1 << id % 8);
  writer.put_varint(bits.size());
  writer.put_varint(base);
  for (const std::uint8_t byte : bits) writer.put(byte);
}

std::vector<std::uint32_t> get_bits(Reader& reader) {
  std::vector<std::uint32_t> ids;
  const std::size_t size = reader.get_count(1);
  if (size == 0) return ids;
  const auto base = static_cast<std::uint32_t>(reader.get_int(kMaxId / 8));
  for (std::size_t i = 0; i < size; ++i) {
    const auto byte = reader.get<std::uint8_t>();
    for (std::uint32_t bit = 0; bit < 8; ++bit) {
      if ((byte >> bit & 1) != 0) ids.push_back((base + static_cast<std::uint32_t>(i)) * 8 + bit);
    }
  }
  return ids;
}

void put_leaver(Writer& writer, int rank) {
  writer.put_varint(static_cast<std::uint64_t>(rank - kSetRemoved));
}

int get_leaver(Reader& reader) { return reader.get_int(kMaxRank) + kSetRemoved; }

void Series::put_name(Writer& writer, const std::string& name) {
  const auto [head, tail] = shared(name);
  writer.put_varint(head);
  writer.put_varint(tail);
  writer.put_string(name.substr(head, name.size() - head - tail));
  name_ = name;
}

std::string Series::get_name(Reader& reader) {
  const std::uint64_t head = reader.get_varint();
  const std::uint64_t tail = reader.get_varint();
  if (head > name_.size() || tail > name_.size() - head) {
    throw WireError("a name shares more characters than its predecessor has");
  }
  if (head > kMostShared || tail > kMostShared) {
    throw WireError("a name shares too many characters");
  }
  const std::string middle = reader.get_string();
  name_ = name_.substr(0, head) + middle + name_.substr(name_.size() - tail);
  if (name_.empty()) throw WireError("empty operation name");
  if (name_.size() > kLongestName) throw WireError("operation name too long");
  return name_;
}

void Series::put(Writer& writer, const Signature& signature) {
  const bool is_same = signature_ && repetitions_left_ > 0 && *signature_ == signature;
  writer.put(static_cast<std::uint8_t>(is_same));
  if (is_same) {
    --repetitions_left_;
    return;
  }
  put_signature(writer, signature);
  begin(signature);
}

Signature Series::get(Reader& reader) {
  if (!get_bool(reader)) {
    begin(get_signature(reader));
  } else if (!signature_) {
    throw WireError("the first signature refers to a predecessor");
  } else if (repetitions_left_ == 0) {
    throw WireError("a signature is repeated too often");
  } else {
    --repetitions_left_;
  }
  return *signature_;
}

// A signature of n shapes, dimensions and characters takes at least n bytes once and one byte in
// each repetition, so that kRepeated / n repetitions expand a message by a constant factor.
std::size_t Series::repetitions(std::size_t size) {
  constexpr std::size_t kRepeated = 4096;
  constexpr std::size_t kFewest = 8;
  return std::max(kFewest, kRepeated / size);
}

void Series::begin(const Signature& signature) {
  std::size_t size = 1 + signature.shapes.size() + signature.layout.size();
  for (const Shape& shape : signature.shapes) size += shape.size();
  repetitions_left_ = repetitions(size);
  signature_ = signature;
}

void Series::put_ranks(Writer& writer, const RankRanges& ranks) {
  const bool is_same = ranks_ && repetitions_of_ranks_left_ > 0 && *ranks_ == ranks;
  writer.put(static_cast<std::uint8_t>(is_same));
  if (is_same) {
    --repetitions_of_ranks_left_;
    return;
  }
  put_ranges(writer, ranks);
  begin_ranks(ranks);
}

RankRanges Series::get_ranks(Reader& reader) {
  if (!get_bool(reader)) {
    begin_ranks(get_ranges(reader));
  } else if (!ranks_) {
    throw WireError("the first set of ranks refers to a predecessor");
  } else if (repetitions_of_ranks_left_ == 0) {
    throw WireError("a set of ranks is repeated too often");
  } else {
    --repetitions_of_ranks_left_;
  }
  return *ranks_;
}

// As of a signature: a range takes at least two bytes once.
void Series::begin_ranks(const RankRanges& ranks) {
  repetitions_of_ranks_left_ = repetitions(1 + ranks.ranges().size());
  ranks_ = ranks;
}

std::pair<std::size_t, std::size_t> Series::shared(const std::string& name) const {
  const std::size_t most = std::min(name.size(), name_.size());
  const std::size_t most_head = std::min(most, kMostShared);
  std::size_t head = 0;
  while (head < most_head && name[head] == name_[head]) ++head;
  const std::size_t most_tail = std::min(most - head, kMostShared);
  std::size_t tail = 0;
  while (tail < most_tail && name.rbegin()[static_cast<std::ptrdiff_t>(tail)] ==
                                 name_.rbegin()[static_cast<std::ptrdiff_t>(tail)]) {
    ++tail;
  }
  return {head, tail};
}

}  // namespace horoplug
