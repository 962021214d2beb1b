// Tests of what the host computes for the GPU kernels: tables, layouts, names and factors.
#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "device/cpu/kernels.h"
#include "device/cuda/jit/source.h"
#include "device/cuda/runtime/batch.h"

namespace {

using namespace horoplug;
using namespace horoplug::cuda;

TEST_CASE("a table has one chunk for each transfer that is not empty") {
  constexpr std::uint64_t kTile = kTileBytes / 4;
  const std::vector<Transfer> transfers = {{0x1000, 0x2000, 1},
                                           {0x3000, 0x4000, 0},
                                           {0x5000, 0x6000, kTile},
                                           {0x5004, 0x6000, kTile + 1},
                                           {7, 0x9004, 3 * kTile, true}};
  const BatchTable table = make_table(transfers, {4, 4});
  REQUIRE(table.chunks.size() == 4);
  const std::uint32_t first_tiles[] = {0, 1, 2, 4}, flags[] = {kAligned, kAligned, 0, kFill};
  for (std::size_t i = 0; i < 4; ++i) {
    CHECK(table.chunks[i].first_tile == first_tiles[i]);
    CHECK(table.chunks[i].flags == flags[i]);
  }
  CHECK(table.tiles == 7);
  CHECK(make_table({}, {4, 4}).tiles == 0);
}

TEST_CASE("the size of a tile is counted in the narrower of the two element types") {
  const std::vector<Transfer> transfers = {{0, 0, kTileBytes / 2 + 1}};
  CHECK(make_table(transfers, {4, 2}).tiles == 2);
  CHECK(make_table(transfers, {2, 4}).tiles == 2);
  CHECK(make_table(transfers, {4, 4}).tiles == 3);
}

TEST_CASE("a chunk is flagged as aligned only if all its addresses are aligned") {
  const std::vector<Transfer> transfers = {{32, 64, 5}};
  const std::vector<std::uint64_t> even = {0x100, 0x200}, odd = {0x100, 0x204}, bad = {0x101};
  CHECK(make_table(transfers, {4, 4}, even).chunks[0].flags == kAligned);
  CHECK(make_table(transfers, {4, 4}, odd).chunks[0].flags == 0);
  CHECK_THROWS_AS(make_table(transfers, {4, 4}, bad), Error);
  const std::vector<Transfer> astray = {{32, 66, 5}};
  CHECK_THROWS_AS(make_table(astray, {4, 4}), Error);
  CHECK_NOTHROW(make_table(astray, {4, 2}));
}

TEST_CASE("a batch that is larger than any memory is rejected") {
  const std::vector<Transfer> transfers = {{0, 0, std::uint64_t{1} << 46}};
  CHECK_THROWS_AS(make_table(transfers, {8, 8}), Error);
}

TEST_CASE("tensors are aligned to 16 bytes in a fusion buffer") {
  const std::vector<std::uint64_t> sizes = {4, 0, 16, 17, 1};
  const FusedLayout layout = lay_out(sizes);
  CHECK(layout.offsets == std::vector<std::uint64_t>{0, 16, 16, 32, 64});
  CHECK(layout.bytes == 80);
}

TEST_CASE("kernels are named after their operation and dtypes") {
  CHECK(move_kernel(DType::kFloat32, DType::kFloat32, {}) == "copy_32");
  CHECK(move_kernel(DType::kBool, DType::kBool, {2, 1}) == "copy_8");
  CHECK(move_kernel(DType::kInt64, DType::kInt64, {1, 3}) == "scale_int64");
  CHECK(move_kernel(DType::kFloat32, DType::kBFloat16, {}) == "cast_float32_bfloat16");
  CHECK(reduce_kernel(ReduceOp::kAverage, DType::kFloat16) == "reduce_sum_float16");
  CHECK_THROWS_AS(move_kernel(DType::kFloat64, DType::kFloat16, {}), Error);
  CHECK_THROWS_AS(move_kernel(DType::kFloat32, DType::kInt16, {}), Error);
  CHECK_THROWS_AS(reduce_kernel(ReduceOp::kAdasum, DType::kFloat32), Error);
}

TEST_CASE("there is a GPU kernel for every operation of the CPU kernels") {
  for (int d = 0; d < kDTypeCount; ++d) {
    const auto dtype = static_cast<DType>(d);
    for (const Finish& finish : {Finish{}, Finish{0.5, 3}}) {
      CHECK((find_kernel(move_kernel(dtype, dtype, finish)) != nullptr));
    }
    for (const ReduceOp op :
         {ReduceOp::kAverage, ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
      const bool on_cpu = kernels().reduce[static_cast<int>(op)][d] != nullptr;
      CHECK((find_kernel(reduce_kernel(op, dtype)) != nullptr) == on_cpu);
    }
    if (has_adasum(dtype)) {
      CHECK((find_kernel(std::string("dots_") + dtype_name(dtype)) != nullptr));
      CHECK((find_kernel(std::string("blend_") + dtype_name(dtype)) != nullptr));
    }
  }
  const KernelName* const cast = find_kernel("cast_float32_float16");
  REQUIRE((cast != nullptr));
  CHECK(std::string(cast->only) == "-DHP_ONLY=HP_MOVE(cast_float32_float16,Float32,Float16)");
  CHECK((find_kernel("cast_float32_int8") == nullptr));
}

}  // namespace
