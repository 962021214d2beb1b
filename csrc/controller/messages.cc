#include "controller/messages.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace horoplug {
namespace {

constexpr int kMaxRank = std::numeric_limits<std::int32_t>::max() - 1;
// Far beyond any model. It keeps a forged bit field from allocating much memory.
constexpr std::uint32_t kMaxId = 1 << 26;
constexpr std::size_t kMostNameBytes = 64 << 20;  // in one message

Writer begin(MessageKind kind, std::uint32_t set = 0) {
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

hp_status get_status(Reader& reader) { return static_cast<hp_status>(reader.get_int(HP_INTERNAL)); }

double get_seconds(Reader& reader) {
  const auto value = reader.get<double>();
  if (!std::isfinite(value) || value < 0) throw WireError("invalid duration");
  return value;
}

void put_ranks(Writer& writer, const std::vector<int>& ranks) {
  writer.put_varint(ranks.size());
  for (const int rank : ranks) writer.put_varint(static_cast<std::uint64_t>(rank));
}

std::vector<int> get_ranks(Reader& reader) {
  std::vector<int> ranks(reader.get_count(1));
  for (int& rank : ranks) rank = reader.get_int(kMaxRank);
  return ranks;
}

void put_signature(Writer& writer, const Signature& signature) {
  writer.put(signature.op);
  writer.put(signature.dtype);
  writer.put(signature.wire_dtype());
  writer.put(signature.reduce);
  writer.put(signature.root);
  writer.put(signature.device);
  writer.put(signature.prescale);
  writer.put(signature.postscale);
  writer.put(static_cast<std::uint8_t>(signature.recurring));
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
  const DType wire = reader.get_enum<DType>(kDTypeCount);
  if (wire != signature.dtype) signature.compressed = wire;
  signature.reduce = reader.get_enum<ReduceOp>(kReduceOpCount);
  signature.root = reader.get<std::int32_t>();
  signature.device = reader.get<std::int32_t>();
  signature.prescale = reader.get<double>();
  signature.postscale = reader.get<double>();
  signature.recurring = get_bool(reader);
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

// Encodes ids as a bit field that starts at the byte of the smallest id.
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

// Successive names of a message mostly differ in a few characters, and successive signatures are
// mostly equal. A name is encoded by the prefix and suffix that it shares with the name before it,
// and a signature that equals its predecessor by one byte.
class Series {
 public:
  void put_name(Writer& writer, const std::string& name) {
    const auto [head, tail] = shared(name);
    writer.put_varint(head);
    writer.put_varint(tail);
    writer.put_string(name.substr(head, name.size() - head - tail));
    name_ = name;
  }
  std::string get_name(Reader& reader) {
    const std::uint64_t head = reader.get_varint();
    const std::uint64_t tail = reader.get_varint();
    if (head > name_.size() || tail > name_.size() - head) {
      throw WireError("a name shares more characters than its predecessor has");
    }
    const std::string middle = reader.get_string();
    name_ = name_.substr(0, head) + middle + name_.substr(name_.size() - tail);
    if (name_.empty()) throw WireError("empty operation name");
    // A few bytes could repeat a long name many times.
    bytes_ += name_.size();
    if (name_.size() > kLongestName || bytes_ > kMostNameBytes)
      throw WireError("operation names too long");
    return name_;
  }

  void put(Writer& writer, const Signature& signature) {
    const bool is_same = signature_ && *signature_ == signature;
    writer.put(static_cast<std::uint8_t>(is_same));
    if (!is_same) put_signature(writer, signature);
    signature_ = signature;
  }
  Signature get(Reader& reader) {
    if (!get_bool(reader)) {
      signature_ = get_signature(reader);
    } else if (!signature_) {
      throw WireError("the first signature refers to a predecessor");
    }
    return *signature_;
  }

 private:
  std::pair<std::size_t, std::size_t> shared(const std::string& name) const {
    const std::size_t most = std::min(name.size(), name_.size());
    std::size_t head = 0;
    while (head < most && name[head] == name_[head]) ++head;
    std::size_t tail = 0;
    while (tail < most - head && name.rbegin()[static_cast<std::ptrdiff_t>(tail)] ==
                                     name_.rbegin()[static_cast<std::ptrdiff_t>(tail)]) {
      ++tail;
    }
    return {head, tail};
  }

  std::string name_;
  std::size_t bytes_ = 0;  // of all names read so far
  std::optional<Signature> signature_;
};

// Orders ranks for the reader of a message.
void put_numbers(Writer& writer, const std::vector<std::uint32_t>& numbers) {
  writer.put_varint(numbers.size());
  for (const std::uint32_t number : numbers) writer.put_varint(number);
}

std::vector<std::uint32_t> get_numbers(Reader& reader) {
  std::vector<std::uint32_t> numbers(reader.get_count(1));
  for (auto& number : numbers) number = static_cast<std::uint32_t>(reader.get_int(kMaxId));
  return numbers;
}

// A short message must not expand to much more memory than its length.
constexpr int kMostChoices = 32;
constexpr int kMostRounds = 1 << 20;
constexpr std::int64_t kChunkUnit = 64;

void put(Writer& writer, const Tuning& tuning) {
  for (const std::int64_t value :
       {tuning.bucket_bytes, tuning.chunk_bytes, tuning.lanes, tuning.latency_percent}) {
    writer.put_varint(static_cast<std::uint64_t>(value));
  }
}

Tuning get_tuning(Reader& reader) {
  Tuning tuning;
  for (std::int64_t* const value :
       {&tuning.bucket_bytes, &tuning.chunk_bytes, &tuning.lanes, &tuning.latency_percent}) {
    *value = static_cast<std::int64_t>(reader.get_varint());
    if (*value < 1) throw WireError("invalid plan setting");
  }
  if (tuning.chunk_bytes < Tuning::kLeastChunk || tuning.chunk_bytes > Tuning::kMostChunk ||
      tuning.chunk_bytes % kChunkUnit != 0) {
    throw WireError("invalid chunk size");
  }
  return tuning;
}

// Choices often differ only in their settings: batches that equal those of the previous choice are
// not repeated.
// told again.
void put_choices(Writer& writer, const std::vector<PlanChoice>& choices) {
  writer.put_varint(choices.size());
  for (std::size_t i = 0; i < choices.size(); ++i) {
    put(writer, choices[i].tuning);
    const bool is_same = i > 0 && choices[i].batches == choices[i - 1].batches;
    writer.put_varint(is_same ? 0 : choices[i].batches.size());
    if (is_same) continue;
    for (const auto& slots : choices[i].batches) put_numbers(writer, slots);
  }
}

std::vector<PlanChoice> get_choices(Reader& reader) {
  std::vector<PlanChoice> choices(static_cast<std::size_t>(reader.get_int(kMostChoices)));
  if (choices.empty()) throw WireError("plan without batches");
  for (std::size_t i = 0; i < choices.size(); ++i) {
    choices[i].tuning = get_tuning(reader);
    PlanContents& batches = choices[i].batches;
    batches.resize(reader.get_count(2));
    for (auto& slots : batches) {
      slots = get_numbers(reader);
      if (slots.empty()) throw WireError("plan with an empty batch");
    }
    if (!batches.empty()) continue;
    if (i == 0) throw WireError("plan without batches");
    batches = choices[i - 1].batches;
  }
  return choices;
}

// A rank, or kSetRemoved.
void put_leaver(Writer& writer, int rank) {
  writer.put_varint(static_cast<std::uint64_t>(rank - kSetRemoved));
}

int get_leaver(Reader& reader) { return reader.get_int(kMaxRank) + kSetRemoved; }

void put_item(Writer& writer, Series& series, const DecisionItem& item) {
  writer.put(item.kind);
  switch (item.kind) {
    case DecisionItem::Kind::kBatch:
      writer.put_varint(item.batch);
      writer.put_varint(item.members.size());
      for (const auto& member : item.members) {
        // Bit 0: has an id. Bit 1: has a name. Bit 2: some ranks are absent.
        writer.put(static_cast<std::uint8_t>((member.id ? 1 : 0) | (member.name.empty() ? 0 : 2) |
                                             (member.absent.empty() ? 0 : 4)));
        if (member.id) writer.put_varint(*member.id);
        if (!member.name.empty()) series.put_name(writer, member.name);
        if (!member.absent.empty()) {
          put_ranks(writer, member.absent);
          series.put(writer, member.signature);
        }
      }
      break;
    case DecisionItem::Kind::kJoined:
      writer.put_varint(item.batch);
      writer.put_varint(static_cast<std::uint64_t>(item.rank));
      break;
    case DecisionItem::Kind::kError:
      writer.put_string(item.name);
      [[fallthrough]];
    case DecisionItem::Kind::kFailAll:
      writer.put_varint(item.code);
      writer.put_string(item.text);
      break;
    case DecisionItem::Kind::kClose:
      put_leaver(writer, item.rank);
      break;
    case DecisionItem::Kind::kUninstallPlan:
      writer.put_varint(item.batch);
      break;
    case DecisionItem::Kind::kDependencyQuery:
      writer.put_varint(item.batch);
      writer.put_varint(item.operations);
      break;
    case DecisionItem::Kind::kInstallPlan:
      writer.put_varint(item.batch);
      writer.put_varint(item.rounds);
      put_choices(writer, item.choices);
      break;
  }
}

DecisionItem get_item(Reader& reader, Series& series) {
  DecisionItem item;
  item.kind = reader.get_enum<DecisionItem::Kind>(DecisionItem::kKindCount);
  switch (item.kind) {
    case DecisionItem::Kind::kBatch:
      item.batch = reader.get_varint();
      item.members.resize(reader.get_count(2));
      for (auto& member : item.members) {
        const auto flags = reader.get<std::uint8_t>();
        if ((flags & 3) == 0 || flags > 7) throw WireError("unknown flags");
        if ((flags & 1) != 0) member.id = static_cast<std::uint32_t>(reader.get_int(kMaxId));
        if ((flags & 2) != 0) member.name = series.get_name(reader);
        if ((flags & 4) != 0) {
          member.absent = get_ranks(reader);
          if (member.absent.empty()) throw WireError("empty list of absent ranks");
          member.signature = series.get(reader);
        }
      }
      break;
    case DecisionItem::Kind::kJoined:
      item.batch = reader.get_varint();
      item.rank = reader.get_int(kMaxRank);
      break;
    case DecisionItem::Kind::kError:
      item.name = reader.get_string();
      [[fallthrough]];
    case DecisionItem::Kind::kFailAll:
      item.code = get_status(reader);
      item.text = reader.get_string();
      break;
    case DecisionItem::Kind::kClose:
      item.rank = get_leaver(reader);
      break;
    case DecisionItem::Kind::kUninstallPlan:
      item.batch = reader.get_varint();
      break;
    case DecisionItem::Kind::kDependencyQuery:
      item.batch = reader.get_varint();
      item.operations = get_u32(reader);
      break;
    case DecisionItem::Kind::kInstallPlan:
      item.batch = reader.get_varint();
      item.rounds = static_cast<std::uint32_t>(reader.get_int(kMostRounds));
      item.choices = get_choices(reader);
      break;
  }
  return item;
}

}  // namespace

MessageHead read_head(Reader& reader) {
  const auto kind = reader.get_enum<MessageKind>(kMessageKindCount);
  return {kind, get_u32(reader)};
}

Bytes encode(const Hello& hello) {
  Writer writer = begin(MessageKind::kHello);
  writer.put(hello.protocol);
  writer.put(hello.rank);
  writer.put(hello.size);
  writer.put(hello.segment_bytes);
  writer.put_varint(hello.settings.size());
  for (const auto& [name, value] : hello.settings) {
    writer.put_string(name);
    writer.put_string(value);
  }
  return writer.take();
}

Hello decode_hello(Reader& reader) {
  Hello hello;
  hello.protocol = reader.get<std::uint32_t>();
  // Fields that another version of the protocol appends are ignored.
  if (hello.protocol != Hello::kProtocol) return hello;
  hello.rank = reader.get<std::int32_t>();
  hello.size = reader.get<std::int32_t>();
  hello.segment_bytes = reader.get<std::uint64_t>();
  hello.settings.resize(reader.get_count(2));
  for (auto& [name, value] : hello.settings) {
    name = reader.get_string();
    value = reader.get_string();
  }
  reader.expect_end();
  return hello;
}

Bytes encode(std::uint32_t set, const Ready& ready) {
  Writer writer = begin(MessageKind::kReady, set);
  writer.put_varint(ready.epoch);
  put_bits(writer, ready.ids);
  writer.put_varint(ready.requests.size());
  Series series;
  for (const Request& request : ready.requests) {
    series.put_name(writer, request.name);
    writer.put_varint(request.variants.size());
    for (const Variant& variant : request.variants) {
      series.put(writer, variant.signature);
      put_ranks(writer, variant.ranks);
    }
  }
  return writer.take();
}

Ready decode_ready(Reader& reader) {
  Ready ready;
  ready.epoch = get_u32(reader);
  ready.ids = get_bits(reader);
  ready.requests.resize(reader.get_count(2));
  Series series;
  for (Request& request : ready.requests) {
    request.name = series.get_name(reader);
    request.variants.resize(reader.get_count(1));
    if (request.variants.empty()) throw WireError("readiness request without variants");
    for (Variant& variant : request.variants) {
      variant.signature = series.get(reader);
      variant.ranks = get_ranks(reader);
      if (variant.ranks.empty() && request.variants.size() > 1) {
        throw WireError("variants without ranks");
      }
    }
  }
  reader.expect_end();
  return ready;
}

Bytes encode(std::uint32_t set, const Decisions& decisions) {
  Writer writer = begin(MessageKind::kDecisions, set);
  writer.put_varint(decisions.epoch);
  writer.put_varint(decisions.items.size());
  Series series;
  for (const DecisionItem& item : decisions.items) put_item(writer, series, item);
  return writer.take();
}

Decisions decode_decisions(Reader& reader) {
  Decisions decisions;
  decisions.epoch = get_u32(reader);
  decisions.items.resize(reader.get_count(2));
  Series series;
  for (DecisionItem& item : decisions.items) item = get_item(reader, series);
  reader.expect_end();
  return decisions;
}

Bytes encode_leave(std::uint32_t set, int rank) {
  Writer writer = begin(MessageKind::kLeave, set);
  put_leaver(writer, rank);
  return writer.take();
}

int decode_leave(Reader& reader) {
  const int rank = get_leaver(reader);
  reader.expect_end();
  return rank;
}

Bytes encode_join(std::uint32_t set, std::uint32_t epoch, int rank) {
  Writer writer = begin(MessageKind::kJoin, set);
  writer.put_varint(epoch);
  writer.put_varint(static_cast<std::uint64_t>(rank));
  return writer.take();
}

Joined decode_join(Reader& reader) {
  Joined joined{get_u32(reader), reader.get_int(kMaxRank)};
  reader.expect_end();
  return joined;
}

Bytes encode_inspection_request() { return begin(MessageKind::kInspectionRequest).take(); }

Bytes encode_inspection(std::uint64_t inspection) {
  Writer writer = begin(MessageKind::kInspection);
  writer.put_varint(inspection);
  return writer.take();
}

std::uint64_t decode_inspection(Reader& reader) {
  const std::uint64_t inspection = reader.get_varint();
  reader.expect_end();
  return inspection;
}

Bytes encode(const Report& report) {
  Writer writer = begin(MessageKind::kReport);
  writer.put_varint(report.inspection);
  writer.put_varint(report.ranks.size());
  for (const RankReport& rank : report.ranks) {
    writer.put_varint(static_cast<std::uint64_t>(rank.rank));
    writer.put(rank.quiet);
    writer.put(static_cast<std::uint8_t>(rank.executing));
    writer.put_varint(rank.pending.size());
    for (const auto& pending : rank.pending) {
      writer.put_varint(pending.set);
      writer.put_string(pending.name);
      writer.put(pending.age);
      // Bit 0: a thread waits for it. Bit 1: it is a join. Bit 2: it waits for one rank, which
      // follows.
      writer.put(static_cast<std::uint8_t>((pending.waited ? 1 : 0) | (pending.join ? 2 : 0) |
                                           (pending.peer >= 0 ? 4 : 0)));
      if (pending.peer >= 0) writer.put_varint(static_cast<std::uint64_t>(pending.peer));
    }
  }
  return writer.take();
}

Report decode_report(Reader& reader) {
  Report report;
  report.inspection = reader.get_varint();
  report.ranks.resize(reader.get_count(11));
  for (RankReport& rank : report.ranks) {
    rank.rank = reader.get_int(kMaxRank);
    rank.quiet = get_seconds(reader);
    rank.executing = get_bool(reader);
    rank.pending.resize(reader.get_count(11));
    for (auto& pending : rank.pending) {
      pending.set = get_u32(reader);
      pending.name = reader.get_string();
      pending.age = get_seconds(reader);
      const auto flags = reader.get<std::uint8_t>();
      if (flags > 7) throw WireError("unknown flags");
      pending.waited = (flags & 1) != 0;
      pending.join = (flags & 2) != 0;
      if ((flags & 4) != 0) pending.peer = reader.get_int(kMaxRank);
    }
  }
  reader.expect_end();
  return report;
}

namespace {

Bytes encode_failure(MessageKind kind, std::uint32_t set, const Abort& failure) {
  Writer writer = begin(kind, set);
  writer.put_varint(failure.code);
  writer.put_string(failure.text);
  return writer.take();
}

}  // namespace

Bytes encode(const Abort& abort) { return encode_failure(MessageKind::kAbort, 0, abort); }

Bytes encode_fail(std::uint32_t set, const Abort& failure) {
  return encode_failure(MessageKind::kFail, set, failure);
}

Abort decode_abort(Reader& reader) {
  Abort abort;
  abort.code = get_status(reader);
  abort.text = reader.get_string();
  reader.expect_end();
  return abort;
}

Bytes encode_wake_up() { return begin(MessageKind::kWakeUp).take(); }
Bytes encode_ping() { return begin(MessageKind::kPing).take(); }
Bytes encode_pong() { return begin(MessageKind::kPong).take(); }

Bytes encode_bye() { return begin(MessageKind::kBye).take(); }

Bytes encode(std::uint32_t set, const DependencyLabels& labels) {
  Writer writer = begin(MessageKind::kDependencyLabels, set);
  writer.put_varint(labels.query);
  put_numbers(writer, labels.labels);
  return writer.take();
}

DependencyLabels decode_dependency_labels(Reader& reader) {
  DependencyLabels labels;
  labels.query = reader.get_varint();
  labels.labels = get_numbers(reader);
  reader.expect_end();
  return labels;
}

Bytes encode(MessageKind kind, std::uint32_t set, const PlanNotice& notice) {
  Writer writer = begin(kind, set);
  writer.put_varint(notice.epoch);
  writer.put_varint(notice.batch);
  return writer.take();
}

PlanNotice decode_plan_notice(Reader& reader) {
  PlanNotice notice;
  notice.epoch = get_u32(reader);
  notice.batch = reader.get_varint();
  reader.expect_end();
  return notice;
}

}  // namespace horoplug
