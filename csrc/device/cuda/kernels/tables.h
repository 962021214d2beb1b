// The arguments that the CPU passes to a kernel: plain structs with the same layout for the host's
// compiler and for CUDA's.
//
// A batch is a list of chunks, each a run of elements from one place to another, and is cut into
// tiles: a tile belongs to one chunk, and has the same number of elements in all of a kernel's
// tiles but the last of a chunk. Blocks share the tiles evenly, so that tensors of any size keep
// the whole GPU busy, and a batch is one launch.
#pragma once

namespace horoplug::cuda {

// NVRTC has no <cstdint>. NOLINTBEGIN(readability-identifier-naming)
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i8 = signed char;
using i16 = short;
using i32 = int;
using i64 = long long;
// NOLINTEND(readability-identifier-naming)

constexpr u32 kThreads = 256;     // of a block
constexpr u32 kUnroll = 4;        // packets that a thread has in flight
constexpr u32 kPacketBytes = 16;  // in the narrower of the types that are read and written
constexpr u32 kTileBytes = kPacketBytes * kThreads * kUnroll;
constexpr u32 kMaxSources = 64;  // of a reduction

// Of Chunk::flags.
constexpr u32 kAligned = 1;  // all addresses are multiples of 16 bytes
constexpr u32 kFill = 2;     // `from` is the element itself (further bytes of it: 0), which is
                             // neither scaled nor converted

struct Chunk {
  u64 from;        // an address, or how many bytes into every source
  u64 to;          // an address; not used by dot products
  u64 count;       // elements, at least one
  u32 first_tile;  // of all tiles of the batch
  u32 flags;
};

struct Batch {
  const Chunk* chunks;
  u32 chunk_count;
  u32 tiles;
};

// How results are scaled, see Finish in device/cpu/kernels.h.
enum FinishMode : u32 {
  kNoFinish,
  kMultiply,      // floats: * multiply * divide, which is the reciprocal then
  kDivide,        // floats: * multiply / divide
  kThroughFloat,  // integers: likewise in float64, truncated
  kExactShift,    // 64-bit integers: >> divisor, of the magnitude
  kExactDivide,   // / divisor, of the magnitude
  kAllZero,       // the divisor is beyond all integers
};
struct FinishArgs {
  u32 mode;
  u32 negative;  // the divisor was
  u64 divisor;
  double multiply, divide;
};

struct MoveArgs {
  Batch batch;
  FinishArgs finish;
};

struct ReduceArgs {
  Batch batch;  // `from`: how far into every source
  FinishArgs finish;
  u32 sources;
  u32 unused;
  const char* source[kMaxSources];
};

struct Dots {
  double aa, ab, bb;
};

struct DotsArgs {
  Batch batch;  // `from`: how far into a and b
  const char *a, *b;
  Dots* of_tiles;
};

struct SumArgs {
  Batch batch;
  const Dots* of_tiles;
  Dots* of_chunks;
};

struct BlendArgs {
  Batch batch;  // `from`: how far into a and b
  const char *a, *b;
  const Dots* of_chunks;
};

}  // namespace horoplug::cuda
