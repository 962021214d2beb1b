// The messages by which the root announces its decisions.
#include <cstdint>
#include <vector>

#include "controller/messages/message_fields.h"
#include "controller/messages/messages.h"

namespace horoplug {
namespace {

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

std::uint32_t get_place(Reader& reader) {
  return static_cast<std::uint32_t>(reader.get_int(static_cast<int>(kRememberedPlans) - 1));
}

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
          series.put_ranks(writer, member.absent);
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
    case DecisionItem::Kind::kPausePlan:
      writer.put_varint(item.batch);
      break;
    case DecisionItem::Kind::kResumePlan:
      break;
    case DecisionItem::Kind::kDependencyQuery:
      writer.put_varint(item.batch);
      writer.put_varint(item.operations);
      break;
    case DecisionItem::Kind::kRememberPlan:
      writer.put_varint(item.batch);
      writer.put_varint(item.place);
      break;
    case DecisionItem::Kind::kInstallPlan:
      writer.put_varint(item.place);
      writer.put_varint(item.skipped);
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
          member.absent = series.get_ranks(reader);
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
      item.code = get_failure(reader);
      item.text = reader.get_string();
      break;
    case DecisionItem::Kind::kClose:
      item.rank = get_leaver(reader);
      break;
    case DecisionItem::Kind::kUninstallPlan:
    case DecisionItem::Kind::kPausePlan:
      item.batch = reader.get_varint();
      break;
    case DecisionItem::Kind::kResumePlan:
      break;
    case DecisionItem::Kind::kDependencyQuery:
      item.batch = reader.get_varint();
      item.operations = get_u32(reader);
      break;
    case DecisionItem::Kind::kRememberPlan:
      item.batch = reader.get_varint();
      item.place = get_place(reader);
      break;
    case DecisionItem::Kind::kInstallPlan:
      item.place = get_place(reader);
      item.skipped = get_u32(reader);
      item.rounds = static_cast<std::uint32_t>(reader.get_int(kMostRounds));
      item.choices = get_choices(reader);
      break;
  }
  return item;
}

}  // namespace

Bytes encode(std::uint32_t set, const Decisions& decisions) {
  Writer writer = begin_message(MessageKind::kDecisions, set);
  writer.put_varint(decisions.agreement);
  writer.put_varint(decisions.items.size());
  Series series;
  for (const DecisionItem& item : decisions.items) put_item(writer, series, item);
  return writer.take();
}

Decisions decode_decisions(Reader& reader) {
  Decisions decisions;
  decisions.agreement = get_u32(reader);
  decisions.items.resize(reader.get_count(2));
  Series series;
  for (DecisionItem& item : decisions.items) item = get_item(reader, series);
  reader.expect_end();
  return decisions;
}

}  // namespace horoplug
