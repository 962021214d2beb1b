// The memory that the ranks of a simulated communicator share. It is zero at first.
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

// An operation as a rank announces it to the other ranks.
struct Posted {
  Kind kind;
  int dtype, op, root;
  std::uint64_t count;
  std::uint64_t data;  // the address of the input's copy, which is valid in the same process

  bool matches(const Posted& other) const {
    return kind == other.kind && dtype == other.dtype && op == other.op && root == other.root &&
           count == other.count;
  }
};

struct CommunicatorMemory {
  struct Rank {
    Counter joined;  // 1: the next four members are valid
    CUuuid uuid;
    char host[64];
    int ranks, version;

    Counter posted, done;  // the numbers of the last collective operations posted and finished
    Posted operation;      // the last one posted

    Counter split;  // the number of the last ncclCommSplit that this rank called
    struct {
      int color, key;
    } splits[8];  // a ring buffer, indexed by the number of the split

    Counter finalized;
  };
  // A slot for the sends from one rank to another.
  struct Message {
    Counter posted, taken;
    Posted operation;
  };
  std::array<Rank, kMaxRanks> ranks;
  std::array<std::array<Message, kMaxRanks>, kMaxRanks> messages;
};

}  // namespace horoplug::testing::simulated
