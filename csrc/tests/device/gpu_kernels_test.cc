// Compares the GPU kernels, run on the host, with the CPU kernels: the results have the same bits
// for batches of any layout, dtype, size and alignment.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "device/cpu/kernels.h"
#include "device/cuda/runtime/batch.h"
#include "tests/harness/host_grid.h"
#include "tests/harness/random_elements.h"
#include "tests/harness/slowed_down.h"

namespace {

using namespace horoplug;
using namespace horoplug::cuda;
using horoplug::testing::fill;
using horoplug::testing::run_on_cpu;
using horoplug::testing::seed;

constexpr unsigned char kUntouched = 0xa5;

std::uint64_t address(const void* p) { return reinterpret_cast<std::uintptr_t>(p); }

// Memory that is aligned to 16 bytes.
class Memory {
 public:
  explicit Memory(std::size_t bytes) : bytes_(bytes + 16, kUntouched) {}
  unsigned char* at(std::size_t offset) {
    return bytes_.data() + (16 - address(bytes_.data()) % 16) % 16 + offset;
  }

 private:
  std::vector<unsigned char> bytes_;
};

// A tensor at a random offset that is aligned for its dtype, with guard bytes around it.
class Tensor {
 public:
  Tensor(DType dtype, std::size_t count, std::mt19937_64& random)
      : dtype_(dtype),
        count_(count),
        offset_(16 + (random() % 2) * (random() % 16) * dtype_size(dtype)),
        memory_(offset_ + bytes() + 32) {}
  static Tensor filled(DType dtype, std::size_t count, std::mt19937_64& random) {
    Tensor tensor(dtype, count, random);
    fill(dtype, tensor.data(), count, random);
    return tensor;
  }
  unsigned char* data() { return memory_.at(offset_); }
  std::size_t count() const { return count_; }
  std::size_t bytes() const { return count_ * dtype_size(dtype_); }
  bool guards_intact() {
    const auto untouched = [](unsigned char c) { return c == kUntouched; };
    return std::all_of(memory_.at(0), data(), untouched) &&
           std::all_of(data() + bytes(), data() + bytes() + 32, untouched);
  }

 private:
  DType dtype_;
  std::size_t count_, offset_;
  Memory memory_;
};

// Random sizes around 0 and around those of vector loads and tiles.
std::size_t random_count(std::mt19937_64& random, std::size_t tile) {
  const std::size_t around[] = {0, 1, 16, 256, 1024, tile, 2 * tile};
  const std::size_t near = around[random() % std::size(around)] + random() % 20;
  return random() % 3 == 0 ? random() % 50 : near - std::min<std::size_t>(near, random() % 20);
}

std::uint32_t random_blocks(std::mt19937_64& random, std::uint32_t tiles) {
  return 1 + static_cast<std::uint32_t>(random() % (tiles + 2));
}

void run_move(DType from, DType to, Finish finish, const std::vector<Transfer>& transfers,
              std::mt19937_64& random) {
  const BatchTable table = make_table(transfers, {dtype_size(from), dtype_size(to)});
  const MoveArgs args{
      {table.chunks.data(), static_cast<std::uint32_t>(table.chunks.size()), table.tiles},
      finish_args(from, finish)};
  REQUIRE(
      run_on_cpu(move_kernel(from, to, finish), &args, random_blocks(random, table.tiles), random));
}

// The result of moving a tensor with the CPU kernels.
std::vector<unsigned char> moved_by_cpu(DType from, DType to, Finish finish, Tensor& tensor) {
  const KernelTable& table = kernels();
  std::vector<unsigned char> scaled(tensor.bytes() + 1);
  table.scale[static_cast<int>(from)](scaled.data(), tensor.data(), tensor.count(), finish);
  if (from == to) return scaled;
  std::vector<unsigned char> result(tensor.count() * dtype_size(to) + 1);
  if (from == DType::kFloat32) {
    table.narrow_to(to)(result.data(), scaled.data(), tensor.count());
    return result;
  }
  // Widens before scaling, because a GPU kernel rounds only once, at the end.
  table.widen_from(from)(result.data(), tensor.data(), tensor.count());
  table.scale[static_cast<int>(to)](result.data(), result.data(), tensor.count(), finish);
  return result;
}

// Packs random tensors into a fusion buffer, unpacks them, and compares the results.
void check_move(DType from, DType to, Finish finish, std::mt19937_64& random) {
  CAPTURE(seed());
  CAPTURE(std::string(dtype_name(from)));
  CAPTURE(std::string(dtype_name(to)));
  CAPTURE(finish.multiply);
  CAPTURE(finish.divide);
  const std::size_t tile = kTileBytes / std::min(dtype_size(from), dtype_size(to));
  std::vector<Tensor> inputs, outputs;
  std::vector<std::uint64_t> sizes;
  for (std::size_t i = 0, n = 1 + random() % 20; i < n; ++i) {
    inputs.push_back(Tensor::filled(from, random_count(random, tile), random));
    outputs.emplace_back(to, inputs.back().count(), random);
    sizes.push_back(outputs.back().bytes());
  }
  const FusedLayout layout = lay_out(sizes);
  Memory buffer(layout.bytes + 16);
  std::vector<Transfer> packing, unpacking;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const std::uint64_t place = address(buffer.at(layout.offsets[i]));
    packing.push_back({address(inputs[i].data()), place, inputs[i].count()});
    unpacking.push_back({place, address(outputs[i].data()), inputs[i].count()});
  }
  run_move(from, to, finish, packing, random);
  run_move(to, to, {}, unpacking, random);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const auto expected = moved_by_cpu(from, to, finish, inputs[i]);
    CHECK(std::memcmp(outputs[i].data(), expected.data(), outputs[i].bytes()) == 0);
    CHECK(outputs[i].guards_intact());
    const unsigned char* const end = buffer.at(layout.offsets[i] + sizes[i]);
    const std::size_t padding = (16 - sizes[i] % 16) % 16;
    CHECK(std::all_of(end, end + padding, [](unsigned char c) { return c == kUntouched; }));
  }
}

constexpr std::pair<DType, DType> kCasts[] = {{DType::kFloat32, DType::kFloat16},
                                              {DType::kFloat32, DType::kBFloat16},
                                              {DType::kFloat16, DType::kFloat32},
                                              {DType::kBFloat16, DType::kFloat32}};

TEST_CASE("packing and unpacking random batches gives the CPU's results") {
  std::mt19937_64 random(seed());
  for (int round = 0; round < 3; ++round) {
    for (int d = 0; d < kDTypeCount; ++d) {
      const auto dtype = static_cast<DType>(d);
      check_move(dtype, dtype, {}, random);
      check_move(dtype, dtype, {0.25, 3}, random);
    }
    for (const auto& [from, to] : kCasts) {
      check_move(from, to, {}, random);
      check_move(from, to, {1, 8}, random);
      check_move(from, to, {0.1, 3}, random);
    }
  }
}

TEST_CASE("scaling by any factor gives the CPU's results") {
  std::mt19937_64 random(seed());
  const double inf = std::numeric_limits<double>::infinity();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double factors[] = {1.0, 2.0, 3.0,    -7.0,    0.1,   1e-30,    1e30,    0x1p63, 0.0,
                            inf, nan, 0x1p64, -0x1p63, 255.0, 0x1p-126, 0x1p127, -1.0,   2.5};
  for (const double multiply : factors) {
    for (const double divide : factors) {
      const Finish finish{multiply, divide};
      const auto check = [&](DType from, DType to) {
        CAPTURE(seed());
        CAPTURE(std::string(dtype_name(from)));
        CAPTURE(std::string(dtype_name(to)));
        CAPTURE(multiply);
        CAPTURE(divide);
        Tensor input = Tensor::filled(from, 67, random), output(to, 67, random);
        run_move(from, to, finish, {{address(input.data()), address(output.data()), 67}}, random);
        const auto expected = moved_by_cpu(from, to, finish, input);
        CHECK(std::memcmp(output.data(), expected.data(), output.bytes()) == 0);
      };
      for (int d = 0; d < kDTypeCount; ++d) check(static_cast<DType>(d), static_cast<DType>(d));
      for (const auto& [from, to] : kCasts) check(from, to);
    }
  }
}

TEST_CASE("all 16-bit floats and all ties between them are converted correctly") {
  for (const DType half : {DType::kFloat16, DType::kBFloat16}) {
    CAPTURE(std::string(dtype_name(half)));
    std::mt19937_64 random(seed());
    Tensor all(half, 65536, random), wide(DType::kFloat32, 65536, random);
    for (std::uint32_t i = 0; i < 65536; ++i) {
      reference::store(all.data(), i, static_cast<std::uint16_t>(i));
    }
    run_move(half, DType::kFloat32, {}, {{address(all.data()), address(wide.data()), 65536}},
             random);
    const auto expected = moved_by_cpu(half, DType::kFloat32, {}, all);
    CHECK(std::memcmp(wide.data(), expected.data(), wide.bytes()) == 0);

    Tensor near(DType::kFloat32, 6 * 65536, random), narrow(half, 6 * 65536, random);
    for (std::uint32_t i = 0; i < 65536; ++i) {
      const auto bits = reference::load<std::uint32_t>(wide.data(), i);
      const std::uint32_t middle = half == DType::kFloat16 ? 0x1000 : 0x8000;
      const std::uint32_t values[] = {bits,          bits + 1,          bits - 1,
                                      bits + middle, bits + middle + 1, bits + middle - 1};
      for (std::uint32_t k = 0; k < 6; ++k) reference::store(near.data(), 6 * i + k, values[k]);
    }
    run_move(DType::kFloat32, half, {},
             {{address(near.data()), address(narrow.data()), near.count()}}, random);
    const auto rounded = moved_by_cpu(DType::kFloat32, half, {}, near);
    CHECK(std::memcmp(narrow.data(), rounded.data(), narrow.bytes()) == 0);
  }
}

TEST_CASE("absent tensors are filled with one element, neither scaled nor converted") {
  std::mt19937_64 random(seed());
  for (const std::size_t count : {1, 9, 5000}) {
    Tensor input = Tensor::filled(DType::kFloat32, count, random);
    Tensor packed(DType::kFloat16, count, random), absent(DType::kFloat16, count, random);
    run_move(DType::kFloat32, DType::kFloat16, {3, 1},
             {{0xfc00, address(absent.data()), count, true},
              {address(input.data()), address(packed.data()), count}},
             random);
    for (std::size_t i = 0; i < count; ++i) {
      REQUIRE(reference::load<std::uint16_t>(absent.data(), i) == 0xfc00);
    }
    CHECK(absent.guards_intact());
    const auto expected = moved_by_cpu(DType::kFloat32, DType::kFloat16, {3, 1}, input);
    CHECK(std::memcmp(packed.data(), expected.data(), packed.bytes()) == 0);
  }
}

// Reduces `sources` buffers of several tensors into outputs or, if `in_place`, into the last
// source.
void check_reduce(ReduceOp op, DType dtype, int sources, Finish finish, bool in_place,
                  std::mt19937_64& random) {
  CAPTURE(seed());
  CAPTURE(std::string(reduce_op_name(op)));
  CAPTURE(std::string(dtype_name(dtype)));
  CAPTURE(sources);
  const std::size_t size = dtype_size(dtype), tile = kTileBytes / size;
  std::vector<std::size_t> counts;
  std::vector<std::uint64_t> sizes;
  for (std::size_t i = 0, n = 1 + random() % 4; i < n; ++i) {
    counts.push_back(random_count(random, tile));
    sizes.push_back(counts.back() * size);
  }
  const FusedLayout layout = lay_out(sizes);
  std::vector<Tensor> buffers, outputs;
  std::vector<std::uint64_t> bases;
  for (int s = 0; s < sources; ++s) {
    buffers.push_back(Tensor::filled(dtype, layout.bytes / size, random));
    bases.push_back(address(buffers.back().data()));
  }
  std::vector<Transfer> transfers;
  std::vector<std::vector<unsigned char>> expected;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    outputs.emplace_back(dtype, counts[i], random);
    transfers.push_back({layout.offsets[i],
                         in_place ? bases.back() + layout.offsets[i] : address(outputs[i].data()),
                         counts[i]});
    std::vector<const void*> from;
    for (Tensor& buffer : buffers) from.push_back(buffer.data() + layout.offsets[i]);
    expected.emplace_back(sizes[i] + 1);
    kernels().reduce[static_cast<int>(op)][static_cast<int>(dtype)](
        expected.back().data(), from.data(), sources, counts[i], finish);
  }
  const BatchTable table = make_table(transfers, {size, size}, bases);
  ReduceArgs args{};
  args.batch = {table.chunks.data(), static_cast<std::uint32_t>(table.chunks.size()), table.tiles};
  args.finish = finish_args(dtype, finish);
  args.sources = static_cast<std::uint32_t>(sources);
  for (std::size_t s = 0; s < bases.size(); ++s) {
    args.source[s] = reinterpret_cast<const char*>(bases[s]);
  }
  REQUIRE(run_on_cpu(reduce_kernel(op, dtype), &args, random_blocks(random, table.tiles), random));
  for (std::size_t i = 0; i < counts.size(); ++i) {
    const void* const result =
        in_place ? buffers.back().data() + layout.offsets[i] : outputs[i].data();
    CHECK(std::memcmp(result, expected[i].data(), sizes[i]) == 0);
    CHECK(outputs[i].guards_intact());
  }
}

TEST_CASE("reductions of several sources give the CPU's results") {
  std::mt19937_64 random(seed());
  for (const ReduceOp op :
       {ReduceOp::kAverage, ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
    for (int d = 0; d < kDTypeCount; ++d) {
      if (kernels().reduce[static_cast<int>(op)][d] == nullptr) continue;
      if (testing::kSlowedDown && (static_cast<int>(op) + d) % 3 != 0) continue;
      for (const int sources : {2, 3, 8}) {
        const double divide = op == ReduceOp::kAverage ? sources : 1.0;
        check_reduce(op, static_cast<DType>(d), sources, {1.0, divide}, random() % 2 == 0, random);
      }
      check_reduce(op, static_cast<DType>(d), static_cast<int>(kMaxSources), {0.3, 7}, false,
                   random);
    }
  }
}

// The dot products of the chunks of a batch; offsets in `a` and `b` are counted in elements.
std::vector<Dots> dots_of(DType dtype, const unsigned char* a, const unsigned char* b,
                          const std::vector<std::pair<std::size_t, std::size_t>>& chunks,
                          std::mt19937_64& random) {
  const std::size_t size = dtype_size(dtype);
  std::vector<Transfer> transfers;
  for (const auto& [at, count] : chunks) transfers.push_back({at * size, 0, count});
  const std::vector<std::uint64_t> bases = {address(a), address(b)};
  const BatchTable table = make_table(transfers, {size, size}, bases);
  const cuda::Batch batch{table.chunks.data(), static_cast<std::uint32_t>(table.chunks.size()),
                          table.tiles};
  std::vector<Dots> of_tiles(table.tiles), of_chunks(chunks.size());
  const DotsArgs dots{batch, reinterpret_cast<const char*>(a), reinterpret_cast<const char*>(b),
                      of_tiles.data()};
  REQUIRE(run_on_cpu(std::string("dots_") + dtype_name(dtype), &dots,
                     random_blocks(random, table.tiles), random));
  const SumArgs sum{batch, of_tiles.data(), of_chunks.data()};
  REQUIRE(run_on_cpu("sum_of_tiles", &sum, random_blocks(random, batch.chunk_count), random));
  return of_chunks;
}

// Random elements between -1 and 1.
Tensor ordinary(DType dtype, std::size_t count, std::mt19937_64& random) {
  std::uniform_real_distribution<double> uniform(-1, 1);
  Tensor tensor(dtype, count, random);
  reference::with_element(dtype, [&](auto element) {
    using E = decltype(element);
    for (std::size_t i = 0; i < count; ++i) {
      E::put(tensor.data(), i, static_cast<typename E::Value>(uniform(random)));
    }
  });
  return tensor;
}

constexpr DType kFloats[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64};

TEST_CASE("dot products are correct and have the same bits in any batch, grid and alignment") {
  std::mt19937_64 random(seed());
  for (const DType dtype : kFloats) {
    CAPTURE(seed());
    CAPTURE(std::string(dtype_name(dtype)));
    const std::size_t size = dtype_size(dtype), tile = kTileBytes / size;
    for (const std::size_t count : {std::size_t{1}, std::size_t{13}, tile - 1, 3 * tile + 5}) {
      Tensor a = ordinary(dtype, count + 40, random), b = ordinary(dtype, count + 40, random);
      const Dots alone = dots_of(dtype, a.data(), b.data(), {{0, count}}, random)[0];
      const DotProducts cpu = kernels().dots[static_cast<int>(dtype)](a.data(), b.data(), count);
      CHECK(alone.aa == doctest::Approx(cpu.aa).epsilon(1e-13));
      CHECK(alone.bb == doctest::Approx(cpu.bb).epsilon(1e-13));
      // If terms cancel out, the error is relative to the terms instead of the sum.
      CHECK(std::abs(alone.ab - cpu.ab) <= 1e-13 * (cpu.aa + cpu.bb));
      for (const std::size_t shift : {0, 1, 16}) {
        Memory x(count * size + 100 * size), y(count * size + 100 * size);
        std::memcpy(x.at(shift * size), a.data(), count * size);
        std::memcpy(y.at(shift * size), b.data(), count * size);
        std::memcpy(x.at((count + 32) * size), a.data(), 7 * size);
        std::memcpy(y.at((count + 32) * size), b.data(), 7 * size);
        const Dots fused =
            dots_of(dtype, x.at(0), y.at(0), {{count + 32, 7}, {shift, count}}, random)[1];
        // NOLINTNEXTLINE(bugprone-suspicious-memory-comparison): the same bits
        CHECK(std::memcmp(&fused, &alone, sizeof fused) == 0);
      }
    }
  }
}

TEST_CASE("linear combinations of two vectors give the CPU's results") {
  std::mt19937_64 random(seed());
  for (const DType dtype : kFloats) {
    const DType result_type = dtype == DType::kFloat64 ? dtype : DType::kFloat32;
    const std::size_t size = dtype_size(dtype), tile = kTileBytes / size;
    for (int round = 0; round < 12; ++round) {
      CAPTURE(seed());
      CAPTURE(std::string(dtype_name(dtype)));
      const std::size_t count = 1 + random_count(random, tile);
      // Even rounds have finite numbers only, odd rounds also have NaNs and infinities.
      Tensor a =
          round % 2 == 0 ? ordinary(dtype, count, random) : Tensor::filled(dtype, count, random);
      Tensor b = ordinary(dtype, count, random), out(result_type, count, random);
      const std::vector<Dots> dots = {round == 0 ? Dots{0, 0, 3} : Dots{0.7 + round, 0.3, 1.9}};
      const std::vector<std::uint64_t> bases = {address(a.data()), address(b.data())};
      const std::vector<Transfer> transfers = {{0, address(out.data()), count}};
      const BatchTable table = make_table(transfers, {size, dtype_size(result_type)}, bases);
      const BlendArgs args{
          {table.chunks.data(), static_cast<std::uint32_t>(table.chunks.size()), table.tiles},
          reinterpret_cast<const char*>(a.data()),
          reinterpret_cast<const char*>(b.data()),
          dots.data()};
      REQUIRE(run_on_cpu(std::string("blend_") + dtype_name(dtype), &args,
                         random_blocks(random, table.tiles), random));
      std::vector<unsigned char> expected(out.bytes());
      const auto coefficient = [](double square, double product) {
        return square == 0 ? 1 : 1 - product / (2 * square);
      };
      kernels().blend[static_cast<int>(dtype)](expected.data(), a.data(), b.data(), count,
                                               coefficient(dots[0].aa, dots[0].ab),
                                               coefficient(dots[0].bb, dots[0].ab));
      CHECK(std::memcmp(out.data(), expected.data(), expected.size()) == 0);
      CHECK(out.guards_intact());
    }
  }
}

TEST_CASE("running an unknown kernel returns false") {
  std::mt19937_64 random(seed());
  CHECK_FALSE(run_on_cpu("copy_256", nullptr, 1, random));
}

}  // namespace
