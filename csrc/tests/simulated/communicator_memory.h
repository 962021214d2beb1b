// What the ranks of a simulated communicator tell each other, in memory of zeros that all of them
// have.
#pragma once

#include <array>
#include <cstdint>

#include "device/cuda/driver/driver.h"
#include "tests/simulated/counter.h"

namespace horoplug::testing::simulated {

inline constexpr int kMaxRanks = 16;

enum class Kind : std::uint32_t {
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kReduce,
  kSend,
  kRecv
};

// An operation, as the others see it.
struct Posted {
  Kind kind;
  int dtype, op, root;
  std::uint64_t count;
  std::uint64_t data;  // its address, for ranks of the same process

  bool matches(const Posted& other) const {
    return kind == other.kind && dtype == other.dtype && op == other.op && root == other.root &&
           count == other.count;
  }
};

struct CommunicatorMemory {
  struct Rank {
    Counter joined;  // 1: what follows is there
    CUuuid uuid;
    char host[64];
    int ranks, version;

    Counter posted, done;  // collective operations, by number
    Posted operation;      // the last one posted

    Counter split;  // the last one that this rank has begun
    struct {
      int color, key;
    } splits[8];  // by number, the last ones

    Counter finalized;
  };
  // From one rank to another.
  struct Message {
    Counter posted, taken;
    Posted operation;
  };
  std::array<Rank, kMaxRanks> ranks;
  std::array<std::array<Message, kMaxRanks>, kMaxRanks> messages;
};

}  // namespace horoplug::testing::simulated
