// The fields that control messages have in common, and their encoding. Reading validates, and
// throws WireError. Only the files that encode messages include this.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/time.h"
#include "base/wire.h"
#include "controller/messages/messages.h"
#include "controller/state/rank_ranges.h"
#include "controller/state/signature.h"

namespace horoplug {

inline constexpr int kMaxRank = std::numeric_limits<std::int32_t>::max() - 1;
// Far beyond any model. It keeps a forged bit field from allocating much memory.
inline constexpr std::uint32_t kMaxId = 1 << 26;

// A message that consists of its header so far.
Writer begin_message(MessageKind kind, std::uint32_t set = 0);

std::uint32_t get_u32(Reader& reader);
bool get_bool(Reader& reader);
// The code of a failure. HP_OK and HP_IN_PROGRESS are refused: operations would end as successes.
hp_status get_failure(Reader& reader);
Seconds get_seconds(Reader& reader);

void put_ranges(Writer& writer, const RankRanges& ranks);
RankRanges get_ranges(Reader& reader);

// Numbers of at most kMaxId.
void put_numbers(Writer& writer, const std::vector<std::uint32_t>& numbers);
std::vector<std::uint32_t> get_numbers(Reader& reader);

// Ascending ids, as a bit field that starts at the byte of the smallest one.
void put_bits(Writer& writer, const std::vector<std::uint32_t>& ids);
std::vector<std::uint32_t> get_bits(Reader& reader);

// A rank, or kSetRemoved.
void put_leaver(Writer& writer, int rank);
int get_leaver(Reader& reader);

// The names, signatures and sets of ranks of one message. Successive names mostly differ in a few
// characters, and successive signatures and sets of ranks are mostly equal. A name is encoded by
// the prefix and suffix that it shares with the name before it, and a signature or a set that
// equals its predecessor by one byte.
//
// All are limited, so that the memory that a message takes is bounded by a multiple of its length:
// a name shares at most kMostShared characters at each end, and after a number of repetitions that
// falls with its size a signature or a set is encoded again.
class Series {
 public:
  void put_name(Writer& writer, const std::string& name);
  std::string get_name(Reader& reader);
  void put(Writer& writer, const Signature& signature);
  Signature get(Reader& reader);
  void put_ranks(Writer& writer, const RankRanges& ranks);
  RankRanges get_ranks(Reader& reader);

 private:
  static constexpr std::size_t kMostShared = 255;

  std::pair<std::size_t, std::size_t> shared(const std::string& name) const;
  static std::size_t repetitions(std::size_t size);
  void begin(const Signature& signature);
  void begin_ranks(const RankRanges& ranks);

  std::string name_;
  std::optional<Signature> signature_;
  std::size_t repetitions_left_ = 0;  // of signature_
  std::optional<RankRanges> ranks_;
  std::size_t repetitions_of_ranks_left_ = 0;
};

}  // namespace horoplug
