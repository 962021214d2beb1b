// The messages by which the root announces its decisions.
#include <cstdint>

#include "base/cache_line.h"
#include "controller/messages/message_fields.h"
#include "controller/messages/messages.h"

namespace horoplug {
namespace {

// A short message must not expand to much more memory than its length.
constexpr int kMostChoices = 32;
constexpr int kMostRounds = 1 << 20;
constexpr int kMostPlace = static_cast<int>(kRememberedPlans) - 1;

}  // namespace

void fields(auto& archive, Is<Tuning> auto& tuning) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  archive.number(tuning.bucket_bytes, kMost, 1);
  archive.number(tuning.chunk_bytes, Tuning::kMostChunk, Tuning::kLeastChunk);
  archive.check(tuning.chunk_bytes % std::int64_t{kCacheLine} == 0, "invalid chunk size");
  archive.number(tuning.lanes, kMost, 1);
  archive.number(tuning.latency_percent, kMost, 1);
}

// Choices often differ only in their settings.
void fields(auto& archive, Is<PlanChoice> auto& choice) {
  archive(choice.tuning);
  archive.again(choice.batches);
}

void fields(auto& archive, Is<DecisionItem::Member> auto& member) {
  // Bit 0: has an id. Bit 1: has a name. Bit 2: some ranks are absent.
  int flags = (member.id ? 1 : 0) | (member.name.empty() ? 0 : 2) | (member.absent.empty() ? 0 : 4);
  archive.number(flags, 7);
  archive.check((flags & 3) != 0, "an operation without id and name");
  if ((flags & 1) != 0) {
    std::uint32_t id = member.id.value_or(0);
    archive.number(id, kMaxId);
    if constexpr (std::remove_reference_t<decltype(archive)>::kDecodes) member.id = id;
  }
  if ((flags & 2) != 0) archive.name(member.name);
  if ((flags & 4) != 0) {
    archive.again(member.absent);
    archive.check(!member.absent.empty(), "empty list of absent ranks");
    archive.again(member.signature);
  }
}

void fields(auto& archive, Is<DecisionItem> auto& item) {
  archive.number(item.kind, DecisionItem::kKindCount - 1);
  switch (item.kind) {
    case DecisionItem::Kind::kBatch:
      archive(item.batch);
      archive.list(item.members, 2);
      break;
    case DecisionItem::Kind::kJoined:
      archive(item.batch);
      archive.number(item.rank, kMaxRank);
      break;
    case DecisionItem::Kind::kError:
      archive(item.name);
      [[fallthrough]];
    case DecisionItem::Kind::kFailAll:
      archive(item.code, item.text);
      break;
    case DecisionItem::Kind::kClose:
      archive.number(item.rank, kMaxRank, kSetRemoved);
      break;
    case DecisionItem::Kind::kUninstallPlan:
    case DecisionItem::Kind::kPausePlan:
      archive(item.batch);
      break;
    case DecisionItem::Kind::kResumePlan:
      break;
    case DecisionItem::Kind::kDependencyQuery:
      archive(item.batch, item.operations);
      break;
    case DecisionItem::Kind::kRememberPlan:
      archive(item.batch);
      archive.number(item.place, kMostPlace);
      break;
    case DecisionItem::Kind::kInstallPlan:
      archive.number(item.place, kMostPlace);
      archive(item.skipped);
      archive.number(item.rounds, kMostRounds);
      archive.list(item.choices, 5, kMostChoices);
      break;
  }
}

void fields(auto& archive, Is<Decisions> auto& decisions) {
  archive(decisions.agreement);
  archive.list(decisions.items, 2);
}

template Bytes encode(MessageKind, std::uint32_t, const Decisions&);
template Decisions decode(Reader&);

}  // namespace horoplug
